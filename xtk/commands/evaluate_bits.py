"""`xtk evaluate` without --reward: bits per byte, and how near models are to a teacher, side by side."""

from __future__ import annotations

import contextlib
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtk import terminal
from xtk.artifacts.corpus import Corpus, columns_option
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.commands.evaluated import load_evaluated
from xtk.commands.tables import print_table, with_error
from xtk.errors import XtkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xtk.evaluation.bits import BitsPerByte
    from xtk.evaluation.estimates import Ratio
    from xtk.losses.objective import Objective
    from xtk.tokens.document import Document
    from xtk.training.teachers import Teacher

BITS = "bits_per_byte"
NO_NUMBER = "not a number"
# What says how far a model is from a teacher: with the teacher's own tokenizer, with any, and where the cache holds no
# exact part of distributions. Losses, under their names.
OF_TOKENS, OF_BYTES, OF_REALISED = "forward-kl", "byte-kl", "alm"


@dataclass(frozen=True)
class _Found:
    """What was found of one model.

    Attributes:
        bits: of the text.
        against: by name, what was found against the teacher; empty without one.
    """

    bits: BitsPerByte
    against: dict[str, Ratio]

    def measures(self) -> dict[str, Ratio]:
        """Return everything that has an error, bits per byte first."""
        return {BITS: self.bits.of_documents, **self.against}


def evaluate_bits(
    folders: dict[str, tuple[Path, Path | None]], data: list[str], given: dict[str, Any], *, as_json: bool
) -> None:
    """Measure models one after the other, and tell them side by side.

    Args:
        folders: by its name, where each model lies, and its adapter.
        data: as it was given.
        given: the options of the command.
        as_json: print an object a model.
    """
    from xtk.evaluation.against_teacher import CachedDocuments

    cached = [place for place in data if place != "-" and is_cache(place)]
    if cached and (len(data) > 1 or given["teacher"]):
        raise XtkError(
            "a cache is all of the data, and its teacher the only one", where=cached[0],
            hint="xtk evaluate MODEL CACHE; or --teacher MODEL with the documents themselves",
        )  # fmt: skip
    with contextlib.ExitStack() as held:
        documents: Iterable[Document]
        cache: TeacherCache | None = None
        if cached:
            if given["columns"]:
                raise XtkError("a cache has no columns", where=cached[0], hint="no --columns")
            cache = TeacherCache(cached[0])
            documents = CachedDocuments(cache)
        else:
            documents = corpus = Corpus(data, columns_option(given["columns"]), given["max_document_bytes"])
            if given["teacher"]:
                place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="xtk-"))) / "cache"
                cache = _scored(given["teacher"], corpus, place, given)
        results = {name: _measured(name, places, documents, cache, given) for name, places in folders.items()}
        teacher = "" if cache is None else str(cache.header["teacher"]["name"])
        lines = list(_lines(results, data, teacher))
    if as_json:
        for line in lines:
            terminal.result_json(line)
    else:
        _show(results, lines, data, teacher)


def _scored(text: str, corpus: Corpus, place: Path, given: dict[str, Any]) -> TeacherCache:
    """Have a teacher score the data."""
    from xtk.teachers.caching import cache_teacher
    from xtk.teachers.live import read_live_teacher
    from xtk.tokens.signal import support_of

    request = read_live_teacher(text, long_documents="truncate", trust_remote_code=given["trust_remote_code"]).request
    if request.support.draws:  # the default; with the teacher at hand, more exact ids cost nothing that is kept
        request = replace(request, support=support_of("top-k"))
    cache_teacher(request, corpus, place)
    return TeacherCache(place)


def _measured(
    name: str,
    places: tuple[Path, Path | None],
    documents: Iterable[Document],
    cache: TeacherCache | None,
    given: dict[str, Any],
) -> _Found:
    """Measure one model."""
    from xtk.evaluation.against_teacher import against_teacher
    from xtk.evaluation.bits import bits_per_byte
    from xtk.models.causal_lm import Cut
    from xtk.training.teachers import Teacher

    network, tokenizer = load_evaluated(name, places, given)
    model = Cut(network)
    sizes = {"batch_tokens": given["batch_tokens"], "max_length": given["max_length"] or None}
    bits = bits_per_byte(model, tokenizer, documents, by_kind=given["by_category"], **sizes)
    if math.isnan(bits.bits_per_byte):
        terminal.note(
            f"evaluate: {name} says what is not a number: its weights hold such ones, or --dtype {given['dtype']} "
            "is too narrow for it"
        )
    if cache is None:
        return _Found(bits, {})
    teacher = Teacher(str(cache.header["teacher"]["name"]), str(cache.folder.name), cache, tokenizer)
    meeting = teacher.meeting(()) if teacher.tells_likeliest else None
    return _Found(bits, against_teacher(model, tokenizer, cache, _objectives(teacher), meeting, **sizes))


def _objectives(teacher: Teacher) -> list[Objective]:
    """Return the losses that say how far a model is from a teacher."""
    from xtk.losses import LossSpecification
    from xtk.losses.objective import Objective

    names = [OF_BYTES]
    if teacher.support == "none":
        names = [OF_REALISED]
    elif teacher.has_students_tokenizer:
        names = [OF_TOKENS, OF_BYTES]
    losses = [LossSpecification(name, 1.0, ()) for name in names]
    return [Objective(loss.rule(), loss.divergence(), teacher.ground(loss.rule().ground), loss.name) for loss in losses]


def _lines(results: dict[str, _Found], data: Sequence[str], teacher: str) -> Iterable[dict[str, Any]]:
    """Yield what JSON holds of each model."""
    first = next(iter(results.values()))
    for name, found in results.items():
        line: dict[str, Any] = {"model": name, "data": data[0] if len(data) == 1 else list(data)}
        if teacher:
            line["teacher"] = teacher
        for measure, ratio in found.measures().items():
            line |= _figures(measure, ratio, None if found is first else first.measures().get(measure))
        bits = found.bits
        line |= {"bytes": bits.bytes, "documents": bits.documents, "tokens": bits.tokens, "windows": bits.windows}
        line |= {"window": bits.window, "stride": bits.stride}
        if bits.of_kinds:
            line["categories"] = {
                kind: _figures(BITS, ratio, None if found is first else first.bits.of_kinds.get(kind))
                | {"bytes": int(ratio.counts.sum()), "bits": _number(float(ratio.sums.sum()))}
                for kind, ratio in bits.of_kinds.items()
            }
        yield line


def _figures(measure: str, ratio: Ratio, beside: Ratio | None) -> dict[str, Any]:
    """Return a measure with its error, and by how much that of the first model is above it."""
    found: dict[str, Any] = {measure: _number(ratio.value), f"{measure}_error": ratio.estimate().told_error}
    if beside is not None:
        gain = beside.difference(ratio)
        name = "difference" if measure == BITS else f"{measure}_difference"
        found |= {name: _number(gain.value), f"{name}_error": gain.told_error}
    return found


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _show(results: dict[str, _Found], lines: Sequence[dict[str, Any]], data: Sequence[str], teacher: str) -> None:
    """Print a line of one model, or a table of several, or of several measures; then one by category."""
    first = next(iter(results))
    bits = results[first].bits
    of_data = f"{bits.bytes:,} bytes, {bits.documents:,} documents of {', '.join(data)}"
    if len(results) == 1 and not teacher:
        told = _cell(lines[0], BITS)
        terminal.result_line(f"{told} bits per byte  {first}  ({of_data}{_windows(bits)})")
    else:
        measures = list(dict.fromkeys(measure for found in results.values() for measure in found.measures()))
        heads = ["model"]
        rows = [[name] for name in results]
        for measure in measures:
            heads += [measure.replace("_", " "), f"{first} minus it"]
            for row, line in zip(rows, lines, strict=True):
                gain = "difference" if measure == BITS else f"{measure}_difference"
                row += [_cell(line, measure), _cell(line, gain, "+")]
        heads += ["windows"]
        for row, found in zip(rows, results.values(), strict=True):
            row.append(_windows(found.bits).removeprefix("; "))
        print_table(of_data + (f"; teacher: {teacher}" if teacher else ""), heads, rows)
    if bits.of_kinds:
        kinds = sorted(bits.of_kinds, key=lambda kind: -bits.of_kinds[kind].counts.sum())
        rows = [
            [kind, f"{bits.of_kinds[kind].counts.sum() / bits.bytes:.1%}",
             *(_cell(line["categories"].get(kind, {}), BITS) for line in lines)]
            for kind in kinds
        ]  # fmt: skip
        print_table("bits per byte by category", ["category", "bytes", *results], rows)


def _cell(line: dict[str, Any], measure: str, sign: str = "") -> str:
    if measure not in line:
        return ""
    return NO_NUMBER if line[measure] is None else with_error(line[measure], line[f"{measure}_error"], sign)


def _windows(bits: BitsPerByte) -> str:
    """Say how long documents were read; nothing if none was."""
    if bits.windows <= (bits.of_documents.sums != 0).sum():
        return ""
    return f"; windows of {bits.window:,} tokens, {bits.stride:,} apart"
