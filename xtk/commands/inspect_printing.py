"""What `xtk inspect` prints about an artifact: a headline, and groups of rounded values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from xtk import terminal

MAX_LIST_ITEMS = 10  # longest list that is printed in full
NO_SEPARATORS = ("seed", "steps", "step", "algorithm_version")
ROW_KINDS = ("exact", "special", "composed", "mapped", "unmapped", "padding")  # of a projection
_SHA256 = re.compile(r"(sha256:[0-9a-f]{8})[0-9a-f]{56}")
# Kinds in other words than those of --json.
KINDS = {
    "teacher-cache": "teacher cache",
    "teacher-cache-shard": "shard of a teacher cache",
    "teacher-cache-vocabulary-order": "tokens of a teacher cache by frequency",
    "student": "model trained by xtk distill",
    "unfinished student": "unfinished run of xtk distill",
}
# Values by kind and group, as paths in the JSON record; `*`: one line for each value of an object.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "teacher-cache": {
        "Teacher": (
            "header.teacher.name", "header.teacher.embedding_rows", "header.teacher.special_tokens",
            "header.teacher.tokenizer", "header.teacher.weights", "header.options.backend", "header.options.dtype",
        ),
        "Stored per position": (
            "header.options.support", "header.options.top_k", "header.options.top_p", "header.codec.num_samples",
            "header.codec.precision", "statistics.mean_stored_mass", "statistics.mean_exact_ids",
            "statistics.quantization_kl_nats",
        ),
        "Teacher on this text": (
            "statistics.teacher_bits_per_byte", "statistics.mean_entropy_nats",
            "statistics.observed_outside_top_k_fraction", "statistics.vocabulary_fraction",
        ),
        "Size": (
            "statistics.tokens", "statistics.shards", "statistics.bytes", "statistics.bytes_by_section",
            "statistics.shared_file_bytes",
        ),
    },
    "projection": {
        "Method": ("header.method", "header.options", "header.prunings", "header.merges", "header.special_tokens"),
        "Student": ("header.student.tokens", "header.student.tokenizer", "header.student.special_tokens"),
        "Teacher": ("header.teacher.tokens", "header.teacher.tokenizer", "header.teacher.special_tokens"),
        "Rows": ("statistics.rows_by_entries", "statistics.widest_column"),
    },
    "student": {
        "Training": (
            "header.losses", "header.max_steps", "header.num_train_epochs", "header.documents_per_step",
            "header.learning_rate", "header.lr_scheduler_type", "header.mixed_precision", "header.seed",
        ),
        "Inputs": (
            "header.inputs.cache", "header.inputs.data", "header.inputs.projection",
            "header.inputs.student.weights", "header.inputs.student.tokenizer",
        ),
        "Last metrics": ("statistics.metrics.*",),
    },
    "model": {"Tokenizer": ("header.tokenizer", "header.template", "statistics.special_tokens", "statistics.family")},
    "tokenizer": {"Tokenizer": ("header.*", "statistics.*")},
}  # fmt: skip
GROUPS["unfinished student"] = GROUPS["student"]


def print_description(record: dict[str, Any]) -> None:
    """Print an artifact's kind, its headline, and groups of values."""
    kind = record["kind"]
    terminal.result_line(f"{record['path']}: {KINDS.get(kind, kind)}")
    if headline := _headline(record):
        terminal.result_line(f"  {headline}")
    for title, lines in _groups(record).items():
        if lines:
            terminal.result_line("")
            terminal.result_heading(title)
            width = max(len(label) for label, _ in lines)
            for label, text in lines:
                terminal.result_line(f"  {label:{width}}  {text}".rstrip())
    if kind == "projection" and "audit" in record["header"]:
        terminal.result_line("")
        terminal.result_heading("Audit")
        for line in _audit_lines(record["header"]["audit"]):
            terminal.result_line(f"  {line}")


def _audit_lines(audit: dict[str, Any]) -> Iterator[str]:
    """Yield the numbers of student tokens by kind, the table of categories, and the warning if there is one."""
    from xtk.projection.coverage_audit import audit_warning
    from xtk.projection.token_categories import CATEGORIES
    from xtk.terminal_tables import plain_lines

    counts = audit["rows"]
    yield f"rows: {', '.join(f'{counts[kind]:,} {kind}' for kind in ROW_KINDS if kind in counts)}"
    unreached = audit["unreachable_teacher_tokens"]
    yield f"unmapped mass {audit['unmapped_mass']:.2%}; unreachable teacher tokens: {unreached:,}"
    stored = audit.get("categories") or {}
    rows = [["category", "student", "unmatched", "teacher", "unmatched", "unmapped mass", "unreachable"]]
    for name in (name for name in CATEGORIES if name in stored):
        row, figures = [name], stored[name]
        for side in ("student", "teacher"):
            count = figures[f"{side}_tokens"]
            row += [f"{count:,}", f"{figures[f'unmatched_{side}_tokens'] / max(count, 1):.1%}"]
        if "unmapped_mass" in figures:  # stored by build-projection, not by prune-projection
            row += [f"{figures['unmapped_mass']:.2%}", f"{figures['unreachable_teacher_tokens']:,}"]
        rows.append(row)
    if stored:
        width = len(rows[-1])
        yield from ("", *plain_lines([row[:width] for row in rows], [False] + [True] * (width - 1)))
    if warned := audit_warning(audit):
        yield from ("", *warned.splitlines())


def _headline(record: dict[str, Any]) -> str:
    """Return what a reader wants to know first, in one line; "" if the groups are short anyway."""
    header, figures = record["header"], record["statistics"]
    parts: list[str] = []
    match record["kind"]:
        case "teacher-cache" | "teacher-cache-shard":
            per_position = figures.get("bytes_per_position") or figures["bytes"] / max(figures["positions"], 1)
            counts = [terminal.count(figures[f"{noun}s"], noun) for noun in ("document", "position")]
            parts = [", ".join([*counts, terminal.format_bytes(figures["bytes"]), f"{per_position:.1f} B/position"])]
            parts += [f"teacher: {header['teacher']['name']}"] if "teacher" in header else []
        case "projection":
            shape = f"{header['student']['tokens']:,} student tokens to {header['teacher']['tokens']:,} teacher tokens"
            entries = (
                f"{terminal.count(figures['entries'], 'entry', 'entries')}, {terminal.format_bytes(figures['bytes'])}"
            )
            parts = [f"{shape}, {entries}", f"method {header.get('method', 'unknown')}"]
            parts.append(f"unmapped mass {figures['unmapped_mass']:.2%}")
        case "student" | "unfinished student":
            parts = _run_headline(header, figures)
        case "model":
            parts = [f"{figures['parameters']:,} parameters"]
            parts += [f"{header['tokens']:,} tokens"] if "tokens" in header else []
        case "tokenizer":
            parts = [f"{header['tokens']:,} tokens, {figures['special_tokens']:,} special tokens"]
        case _:
            parts = [terminal.format_bytes(figures["bytes"])] if "bytes" in figures else []
    if "verified" in figures:
        parts.append("verified: yes" if figures["verified"] else "verified: no (--verify)")
    return "; ".join(parts)


def _run_headline(header: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    metrics = figures.get("metrics") or {}
    parts = [f"{figures['steps']} steps"] if figures.get("steps") is not None else ["not finished"]
    shown = {"eval_bits_per_byte": "held-out bits per byte", "student_bits_per_byte": "training bits per byte"}
    parts += [f"{label} {metrics[name]:.3f}" for name, label in shown.items() if isinstance(metrics.get(name), float)]
    if header.get("losses"):
        parts.append(f"loss {' + '.join(header['losses'])}")
    return [*parts, f"{figures['files_verified']} files verified"] if "files_verified" in figures else parts


def _groups(record: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return (label, rounded value) by group; all values of a kind without groups."""
    groups = GROUPS.get(record["kind"])
    if groups is None:
        groups = {"Header": ("header.*",), "Statistics": ("statistics.*",)}
    return {title: [pair for path in paths for pair in _values_at(record, path)] for title, paths in groups.items()}


def _values_at(record: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the value at a path such as `header.teacher.name`; nothing if it is missing or empty."""
    value: Any = record
    *parents, last = path.split(".")
    for name in parents:
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping):
        return
    for name, part in value.items() if last == "*" else [(last, value.get(last))]:
        hidden = name in ("verified", "audit", "kind") or part in (None, "", [], {})
        if not hidden:
            yield name.replace("_", " "), _rounded(name, part)


def _rounded(name: str, value: Any) -> str:
    """Return a value as a person writes it: four digits, short hashes, separators in counts but not in ids."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, int):
        return str(value) if name in NO_SEPARATORS or name.endswith("_id") else f"{value:,}"
    if isinstance(value, Mapping):
        plain = name.endswith(("_tokens", "_ids"))  # names of tokens with their ids
        return ", ".join(f"{key} {part if plain else _rounded(str(key), part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        if len(value) > MAX_LIST_ITEMS:
            return f"{len(value):,} entries (--json prints them)"
        return " + ".join(map(str, value)) if name == "losses" else ", ".join(_rounded(name, part) for part in value)
    return _SHA256.sub(r"\1", str(value))
