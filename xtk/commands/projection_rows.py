"""`xtk inspect PROJECTION --token ID`: the teacher tokens and weights of a student token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtk import terminal
from xtk.errors import MismatchError, XtkError

if TYPE_CHECKING:
    from xtk.projection.projection import SparseProjection
    from xtk.text.tokenizer import Tokenizer

TEXT_PREFIX = "text:"


def print_projection_rows(places: Sequence[str], tokens: Sequence[str], *, as_json: bool) -> None:
    """Print rows of the projection `places[0]`; its tokenizers may follow. `tokens`: ids, or `text:TEXT`."""
    from xtk.projection.file import read_projection

    projection = read_projection(Path(places[0]))
    sides = _tokenizers(places, projection.header)
    for number, token in enumerate(tokens):
        record = {"path": places[0], "kind": "projection-row", **_row(projection, _token_id(token, sides), sides)}
        if as_json:
            terminal.result_json(record)
        else:
            if number:
                terminal.result_line("")
            _print_row(record)
    if len(sides) < 2 and not as_json:
        terminal.note(f"to see the tokens' text: xtk inspect {places[0]} STUDENT TEACHER --token {tokens[0]}")


def _tokenizers(places: Sequence[str], header: Mapping[str, Any]) -> dict[str, Tokenizer]:
    """Return the tokenizers that were given, as `student` and `teacher`."""
    from xtk.models.resolver import resolve_model_folder
    from xtk.text.tokenizer import Tokenizer

    sides: dict[str, Tokenizer] = {}
    for place in places[1:]:
        tokenizer = Tokenizer(resolve_model_folder(place, with_weights=False), name=place)
        names = [name for name in ("student", "teacher") if header[name]["tokenizer"] == tokenizer.fingerprint]
        if not names:
            raise MismatchError(
                "this tokenizer is neither the student's nor the teacher's of the projection",
                where=f"{place} ({tokenizer.fingerprint[:15]}), {places[0]}",
                hint="give the two models that the projection was built from",
            )
        sides |= dict.fromkeys(names, tokenizer)
    return sides


def _token_id(token: str, sides: dict[str, Tokenizer]) -> int:
    """Return the id of a student token that is given as its id, or as `text:TEXT`."""
    if token.isdecimal():
        return int(token)
    if not token.startswith(TEXT_PREFIX) or "student" not in sides:
        raise XtkError(
            f"--token {token!r} is not a token id"
            + (", and a text needs the student's tokenizer" if token.startswith(TEXT_PREFIX) else ""),
            hint="use xtk inspect PROJECTION --token ID, or xtk inspect PROJECTION STUDENT TEACHER --token text:TEXT",
        )
    student, text = sides["student"], token.removeprefix(TEXT_PREFIX)
    by_name = {name: number for number, name in student.special_token_names.items()}
    token_id = student.vocabulary.token_of_bytes.get(text.encode("utf-8", "surrogateescape"), by_name.get(text))
    if token_id is None:
        raise XtkError(
            f"the student has no token {text!r}",
            where=student.name,
            hint=f"xtk align STUDENT TEACHER {text!r} shows its tokens",
        )
    return token_id


def _row(projection: SparseProjection, token: int, sides: dict[str, Tokenizer]) -> dict[str, Any]:
    """Return a student token and its entries, the largest weight first, for JSON."""
    if token >= projection.student_width:
        raise XtkError(
            f"the projection has no row {token}", hint=f"use --token with an id below {projection.student_width}"
        )
    entries = slice(*projection.row_offsets[token : token + 2].tolist())
    pairs = zip(projection.teacher_ids[entries].tolist(), projection.weights[entries].tolist(), strict=True)
    return {
        "student_token": _token_record(token, sides.get("student")),
        "entries": [
            {**_token_record(teacher, sides.get("teacher")), "weight": round(weight, 6)}
            for teacher, weight in sorted(pairs, key=lambda pair: -pair[1])
        ],
    }


def _token_record(token: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"id": token}
    if token in tokenizer.special_token_names:
        return {"id": token, "text": tokenizer.special_token_names[token], "special": True}
    spelling = tokenizer.vocabulary.bytes_of(token) if token < len(tokenizer.vocabulary) else b""
    return {"id": token, "text": spelling.decode("utf-8", "replace"), "bytes": spelling.hex(" ")}


def _print_row(record: dict[str, Any]) -> None:
    terminal.result_heading(f"student token {_token_text(record['student_token'])}")
    if not record["entries"]:
        terminal.result_line("  no entries: its probability is not compared with the teacher's")
    for entry in record["entries"]:
        terminal.result_line(f"  {entry['weight']:.4f}  {_token_text(entry)}")


def _token_text(token: dict[str, Any]) -> str:
    if "text" not in token:
        return str(token["id"])
    quoted = token["text"] if token.get("special") else repr(token["text"])
    return f"{token['id']:<7} {quoted}" + (f"  (bytes {token['bytes']})" if token.get("bytes") else "")
