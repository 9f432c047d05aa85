"""`xtk evaluate`: bits per byte, and divergences from a teacher."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtk import terminal
from xtk.commands.evaluated_models import (
    MODEL_OPTIONS,
    EvaluatedModelOptions,
    ModelFolders,
    difference_heading,
    load_model_and_tokenizer,
    models_to_evaluate,
)
from xtk.errors import XtkError
from xtk.files.atomic_files import nan_to_none
from xtk.options.declaration import REQUIRED, Heading, argument, option
from xtk.options.shared import CorpusOptions
from xtk.terminal_tables import format_with_error, print_table

if TYPE_CHECKING:
    from xtk.batches.losses_per_teacher import DistillationTeacher
    from xtk.cache.reader import TeacherCache
    from xtk.data.corpus_reader import Corpus
    from xtk.evaluation.bits_per_byte import BitsPerByteResult
    from xtk.evaluation.standard_errors import Ratio
    from xtk.losses.term import LossTerm
    from xtk.text.document import Document
    from xtk.text.tokenizer import Tokenizer

BITS_METRIC = "bits_per_byte"
SAMPLED_DOCUMENTS = 1000  # in which changes of the text by a tokenizer are counted
# Losses that measure the distance to a teacher: for models with its tokenizer, for any model, and for caches with
# support none.
SAME_TOKENIZER_LOSS, ANY_TOKENIZER_LOSS, OBSERVED_TOKEN_LOSS = "forward-kl", "byte-kl", "alm"
# 1 - the total variation, `sum min(p, q)`: how often a target would accept the model's proposals on this text.
OVERLAP_LOSS, ACCEPTANCE_METRIC = "tvd", "acceptance_on_text"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CorpusOptions, EvaluatedModelOptions):
    """Options of `xtk evaluate`."""

    HEADINGS = (
        Heading("Measures", ("teacher", "by_category")),
        Heading("Model and data", (*MODEL_OPTIONS, CorpusOptions, "max_length", "batch_tokens")),
    )

    data: tuple[str, ...] = argument(
        REQUIRED, "Documents, or one teacher cache. docs/how-to/data.md lists the formats.", metavar="DATA..."
    )
    teacher: str = option(
        "",
        "Teacher to compare with: adds top-1 agreement and divergences; options as in distill --teacher. A teacher "
        "cache as DATA does the same without scoring again.",
        metavar="MODEL[:KEY=VALUE,...]",
    )
    by_category: bool = option(
        False, "Also print the bits per byte of digits, spaces, punctuation, code and each writing system."
    )
    max_length: int = option(
        0, "Maximum number of tokens per window, up to the context length; 0: the context length.", min=0
    )
    batch_tokens: int = option(
        8192, "Tokens per forward pass, padding included; more is faster and needs more memory.", min=1
    )


def evaluate(options: EvaluateOptions) -> None:
    """Measure bits per byte, and the distance from a teacher.

    Bits per byte of a text are comparable between tokenizers. Documents longer than the context are scored in windows
    that overlap by half.

    Examples:
        xtk evaluate ./student heldout.jsonl --compare-to ./baseline
        xtk evaluate ./student heldout.jsonl --teacher ./teacher
    """
    from xtk.cache.output import is_cache
    from xtk.cache.reader import TeacherCache
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.evaluation.cached_teacher_comparison import DocumentsOfCache
    from xtk.text.tokenizer import Tokenizer

    terminal.set_quiet(options.quiet)
    folders = models_to_evaluate(options, options.data)
    data = options.data
    cached = [place for place in data if place != "-" and is_cache(place)]
    if cached and (len(data) > 1 or options.teacher):
        raise XtkError(
            "a teacher cache as DATA cannot be combined with other DATA or with --teacher", where=cached[0],
            hint="use xtk evaluate MODEL CACHE, or --teacher MODEL with the documents",
        )  # fmt: skip
    with contextlib.ExitStack() as held:
        documents: Iterable[Document]
        cache: TeacherCache | None = None
        if cached:
            if options.columns:
                raise XtkError(
                    "--columns does not apply to a teacher cache as DATA", where=cached[0], hint="remove --columns"
                )
            cache = TeacherCache(cached[0])
            documents = DocumentsOfCache(cache)
        else:
            documents = corpus = Corpus(data, parse_columns_option(options.columns), options.max_document_bytes)
            if options.teacher:
                place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="xtk-"))) / "cache"
                cache = _score_with_teacher(options.teacher, corpus, place, options)
        several = folders if len(folders) > 1 else {}
        tokenizers = {
            name: Tokenizer(place, start_token=options.start_token, adapter=adapter)
            for name, (place, adapter) in several.items()
        }
        results = {}
        for name, places in folders.items():
            others = [tokenizer for other, tokenizer in tokenizers.items() if other != name]
            results[name] = _measured(name, places, documents, cache, options, others)
        _note_skipped_bytes(results)
        teacher = "" if cache is None else str(cache.header["teacher"]["name"])
        lines = list(_result_records(results, data, teacher))
    if options.as_json:
        for line in lines:
            terminal.result_json(line)
    else:
        _print_bits_results(results, lines, data, teacher)
    if broken := [name for name, result in results.items() if not math.isfinite(result.bits.bits_per_byte)]:
        raise XtkError(
            f"log-probabilities of {', '.join(broken)} are not finite",
            hint=f"check the weights and config.json of the model, or use a wider --dtype than {options.dtype}",
        )


@dataclass(frozen=True)
class _ModelResult:
    """Bits per byte of one model, and its comparison with the teacher by name: empty without a teacher."""

    bits: BitsPerByteResult
    teacher_measures: dict[str, Ratio]

    def measures(self) -> dict[str, Ratio]:
        """Return all measures with a standard error, bits per byte first."""
        return {BITS_METRIC: self.bits.per_document, **self.teacher_measures}


def _score_with_teacher(text: str, corpus: Corpus, place: Path, options: EvaluateOptions) -> TeacherCache:
    """Score the data with a teacher, and return the cache."""
    from xtk.cache.reader import TeacherCache
    from xtk.cache.teacher_logprobs import make_support
    from xtk.teachers.cache_building import cache_teacher
    from xtk.teachers.online_teacher import parse_online_teacher

    request = parse_online_teacher(text, long_documents="truncate", trust_remote_code=options.trust_remote_code).request
    if request.support == make_support(""):  # the default; exact ids are better for a cache that is not kept
        request = replace(request, support=make_support("top-k"))
    cache_teacher(request, corpus, place)
    return TeacherCache(place)


def _measured(
    name: str,
    places: ModelFolders,
    documents: Iterable[Document],
    cache: TeacherCache | None,
    options: EvaluateOptions,
    others: Sequence[Tokenizer],
) -> _ModelResult:
    """Measure one model, on the bytes that it and the models of other tokenizers predict."""
    from xtk.batches.losses_per_teacher import DistillationTeacher, note_missing_sample_logprobs
    from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
    from xtk.evaluation.cached_teacher_comparison import compare_with_teacher
    from xtk.evaluation.standard_errors import Ratio
    from xtk.models.backbone_with_head import BackboneWithHead
    from xtk.text.normalization_changes import count_normalization_loss

    network, tokenizer = load_model_and_tokenizer(name, places, options)
    model = BackboneWithHead(network)
    sizes: dict[str, Any] = {"batch_tokens": options.batch_tokens, "max_length": options.max_length or None}
    bits = evaluate_bits_per_byte(
        model, tokenizer, documents, by_category=options.by_category, compared_with=others, **sizes
    )
    sample = [document.text for document in islice(documents, SAMPLED_DOCUMENTS) if document.conversation is None]
    if warning := count_normalization_loss(tokenizer, sample).warning():
        terminal.note(
            f"evaluate: warning: {warning}; dropped characters count as bytes but cost no bits, so that bits per byte "
            "are too low to compare with another tokenizer"
        )
    if cache is None:
        return _ModelResult(bits, {})
    teacher = DistillationTeacher(str(cache.header["teacher"]["name"]), str(cache.folder.name), cache, tokenizer)
    note_missing_sample_logprobs([teacher])
    matching = teacher.token_matching(()) if teacher.has_exact_top1 else None
    measures = compare_with_teacher(model, tokenizer, cache, _objectives(teacher), matching, **sizes)
    if (distance := measures.pop(OVERLAP_LOSS, None)) is not None:
        measures[ACCEPTANCE_METRIC] = Ratio(distance.counts - distance.sums, distance.counts)
    return _ModelResult(bits, measures)


def _note_skipped_bytes(results: dict[str, _ModelResult]) -> None:
    """Print how many bytes are scored, if that is not the whole text."""
    bits = next(iter(results.values())).bits
    if bits.num_skipped_bytes:
        which = "the model predicts" if len(results) == 1 else "all compared models predict"
        terminal.note(
            f"evaluate: {bits.bytes:,} of {bits.bytes + bits.num_skipped_bytes:,} bytes are scored, those that "
            f"{which}: without a start token, nothing predicts the first token of a text"
        )


def _objectives(teacher: DistillationTeacher) -> list[LossTerm]:
    """Return the losses that measure the distance to a teacher."""
    from xtk.losses.spec import LossSpec
    from xtk.losses.term import LossTerm

    names = [ANY_TOKENIZER_LOSS]
    if teacher.support == "none":
        names = [OBSERVED_TOKEN_LOSS]
    elif teacher.has_students_tokenizer:
        names = [SAME_TOKENIZER_LOSS, ANY_TOKENIZER_LOSS, *([OVERLAP_LOSS] if teacher.has_exact_top1 else [])]
    losses = [LossSpec(name, 1.0, ()) for name in names]
    return [
        LossTerm(
            loss.make_loss(),
            loss.make_divergence(),
            teacher.comparison_space(loss.make_loss().comparison_space),
            loss.name,
            stop_classes=teacher.stop_classes,
            has_sample_logprobs=teacher.has_sample_logprobs,
        )
        for loss in losses
    ]


def _result_records(results: dict[str, _ModelResult], data: Sequence[str], teacher: str) -> Iterable[dict[str, Any]]:
    """Yield the JSON record of each model."""
    first_name, first = next(iter(results.items()))
    for name, result in results.items():
        line: dict[str, Any] = {"model": name, "data": data[0] if len(data) == 1 else list(data)}
        if result is not first:
            line["difference_of"] = difference_heading([first_name, name])
        if teacher:
            line["teacher"] = teacher
        for measure, ratio in result.measures().items():
            line |= _measure_with_error(measure, ratio, None if result is first else first.measures().get(measure))
        bits = result.bits
        line |= {
            "bytes": bits.bytes,
            "skipped_bytes": bits.num_skipped_bytes,
            "documents": bits.num_documents,
            "tokens": bits.num_tokens,
            "windows": bits.num_windows,
        }
        line |= {"window": bits.window_tokens, "stride": bits.stride}
        if bits.per_category:
            line["categories"] = {
                kind: _measure_with_error(
                    BITS_METRIC, ratio, None if result is first else first.bits.per_category.get(kind)
                )
                | {"bytes": int(ratio.counts.sum()), "bits": nan_to_none(float(ratio.sums.sum()))}
                for kind, ratio in bits.per_category.items()
            }
        yield line


def _measure_with_error(measure: str, ratio: Ratio, reference: Ratio | None) -> dict[str, Any]:
    """Return a measure with its standard error, and the first model's difference to it."""
    record: dict[str, Any] = {measure: nan_to_none(ratio.value), f"{measure}_error": ratio.estimate().finite_error}
    if reference is not None:
        gain = reference.difference(ratio)
        name = "difference" if measure == BITS_METRIC else f"{measure}_difference"
        record |= {name: nan_to_none(gain.value), f"{name}_error": gain.finite_error}
    return record


def _print_bits_results(
    results: dict[str, _ModelResult], lines: Sequence[dict[str, Any]], data: Sequence[str], teacher: str
) -> None:
    """Print a line for one model and measure, else a table; then bits per byte by category."""
    first = next(iter(results))
    bits = results[first].bits
    of_data = f"{bits.bytes:,} bytes in {bits.num_documents:,} documents of {', '.join(data)}"
    if len(results) == 1 and not teacher:
        value = _table_cell(lines[0], BITS_METRIC)
        terminal.result_line(f"{value} bits per byte  {first}  ({of_data}{_windows(bits)})")
    else:
        measures = list(dict.fromkeys(measure for result in results.values() for measure in result.measures()))
        heads = ["model"]
        rows = [[name] for name in results]
        for measure in measures:
            heads += [measure.replace("_", " "), difference_heading(list(results))]
            for row, line in zip(rows, lines, strict=True):
                gain = "difference" if measure == BITS_METRIC else f"{measure}_difference"
                row += [_table_cell(line, measure), _table_cell(line, gain, "+")]
        heads += ["windows"]
        for row, result in zip(rows, results.values(), strict=True):
            row.append(_windows(result.bits).removeprefix("; "))
        print_table(of_data + (f"; teacher: {teacher}" if teacher else ""), heads, rows)
    if bits.per_category:
        kinds = sorted(bits.per_category, key=lambda kind: -bits.per_category[kind].counts.sum())
        rows = [
            [kind, f"{bits.per_category[kind].counts.sum() / bits.bytes:.1%}",
             *(_table_cell(line["categories"].get(kind, {}), BITS_METRIC) for line in lines)]
            for kind in kinds
        ]  # fmt: skip
        print_table("bits per byte by category", ["category", "% of bytes", *results], rows)


def _table_cell(line: dict[str, Any], measure: str, sign: str = "") -> str:
    if measure not in line:
        return ""
    return format_with_error(line[measure], line[f"{measure}_error"], sign)


def _windows(bits: BitsPerByteResult) -> str:
    """Return the window sizes as text; "" if every document fits the context."""
    if bits.window_tokens is None or bits.num_windows <= (bits.per_document.counts > 0).sum():
        return ""
    return f"; windows of {bits.window_tokens:,} tokens, stride {bits.stride:,}"
