"""`xtk transplant`: another tokenizer, or a smaller vocabulary, for a model."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option
from xtk.options.shared import (
    ConfigOption,
    CorpusOptions,
    ForceOption,
    JsonOption,
    QuietOption,
    StartTokenOption,
    TrustRemoteCodeOption,
)
from xtk.terminal_tables import plain_lines

if TYPE_CHECKING:
    from pathlib import Path

    from xtk.text.tokenizer import Tokenizer
    from xtk.transplant.model_transplant import TransplantConfig

DEFAULT_METHOD = "subword"
KINDS = ("exact", "special", "composed", "unknown")


@dataclass(frozen=True, kw_only=True)
class TransplantOptions(
    CorpusOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
    ForceOption,
    JsonOption,
    QuietOption,
    ConfigOption,
    CommandOptions,
):
    """Options of `xtk transplant`."""

    model: str = argument(
        REQUIRED, "Model: a folder, a GGUF file or a Hugging Face hub id; - for standard input.", metavar="MODEL"
    )
    tokenizer: str = argument(
        "",
        "New tokenizer: a folder with tokenizer.json, or a Hugging Face hub id. Omit it with --keep-vocabulary or "
        "--prune-to.",
        metavar="TOKENIZER",
    )
    output: str = output_option("Output folder of the model.", "FOLDER")
    method: str = option(
        DEFAULT_METHOD,
        "Initialization of tokens that are not copied; subword: mean of their old tokens, by length. "
        "docs/how-to/new-tokenizer.md compares the methods.",
        choices=("fvt", "subword", "projection", "omp", "mean", "random"),
    )
    donor: str = option("", "With --method omp: a model that has the new tokenizer.", metavar="MODEL")
    projection: str = option(
        "",
        "With --method projection: file of xtk build-projection TOKENIZER MODEL. Default: its method multitoken.",
        metavar="FILE",
    )
    seed: int = option(0, "With --method random: seed of the rows.")
    keep_chat_template: bool = option(False, "Keep the chat template of the model, not that of the new tokenizer.")
    keep_vocabulary: tuple[str, ...] = option(
        (), "Prune the model's own vocabulary to the tokens that occur in this data. Repeatable.", metavar="DATA"
    )
    prune_to: int = option(
        0,
        "Prune the model's own vocabulary to this many tokens: the most frequent in --keep-vocabulary DATA. Without "
        "DATA, tokens are kept in the order of their merges.",
        min=0,
        metavar="N",
    )
    dtype: str = option(
        "", "Data type of the written weights. Default: that of the model.", metavar="[float32|bfloat16|float16]"
    )
    eval_data: tuple[str, ...] = option(
        (), "Data in which bits per byte are measured before and after. Repeatable.", metavar="DATA"
    )


def transplant(options: TransplantOptions) -> None:
    """Give a model another tokenizer, or a smaller vocabulary.

    The layers are kept. Embedding and output head get a row for each token of the new tokenizer: a copy for tokens with
    equal bytes or the same role, a combination of old rows for others. Distilling from the original model trains them.

    Examples:
        xtk transplant ./model ./tokenizer -o new --eval-data heldout.txt
        xtk transplant ./model --keep-vocabulary corpus.jsonl --prune-to 16000 -o small
    """
    from pathlib import Path

    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
    from xtk.text.tokenizer import Tokenizer
    from xtk.transplant.model_transplant import TransplantConfig, check_transplant, transplant_model

    terminal.set_quiet(options.quiet)
    _check_options(options)
    name = terminal.path_argument(options.model)
    folder, adapter = base_model_and_adapter(resolve_model_folder(name, with_weights=True))
    old = Tokenizer(folder, name=name, adapter=adapter)
    columns = parse_columns_option(options.columns)
    held_out = Corpus(options.eval_data, columns, options.max_document_bytes) if options.eval_data else None
    with contextlib.ExitStack() as held:
        kept, donor = None, None
        if options.tokenizer:
            place = resolve_model_folder(options.tokenizer, with_weights=False)
            new = Tokenizer(place, name=options.tokenizer, start_token=options.start_token)
            donor = resolve_model_folder(options.donor, with_weights=True) if options.donor else None
        else:
            old = old.with_start_token(options.start_token)
            new, kept = held.enter_context(_pruned(old, options, columns))
            new = new.with_start_token(options.start_token)
        config = TransplantConfig(
            folder, adapter, old, new, options.method, donor, Path(options.projection) if options.projection else None,
            options.keep_chat_template, options.dtype, options.seed, kept,
        )  # fmt: skip
        check_transplant(config, Path(options.output), force=options.force)
        # Before anything is written: the data may not be readable.
        before = None if held_out is None else _bits_per_byte(folder, adapter, old, held_out, options)
        manifest = transplant_model(
            config, Path(options.output), force=options.force, trust_remote_code=options.trust_remote_code
        )
        _note_template(config)
    names = ("method", "tokens", *KINDS, "categories", "embedding_rows", "tied", "dtype", "parameters", "eos_token_ids")
    record = {"path": options.output, "kind": manifest["kind"], **{name: manifest[name] for name in names}}
    if held_out is not None:
        after = _bits_per_byte(Path(options.output), None, Tokenizer(options.output), held_out, options)
        record["bits_per_byte"] = {"before": before, "after": after}
    _note_report(record)
    terminal.result_artifact(record, as_json=options.as_json)


def _check_options(options: TransplantOptions) -> None:
    """Refuse options that contradict each other, or have no effect."""
    prunes = bool(options.keep_vocabulary or options.prune_to)
    if prunes == bool(options.tokenizer):
        raise typer.BadParameter(
            "remove TOKENIZER: --keep-vocabulary and --prune-to keep the model's own tokenizer"
            if prunes
            else "TOKENIZER is missing; give a new tokenizer after MODEL, or use --keep-vocabulary or --prune-to"
        )
    if prunes and (options.method != DEFAULT_METHOD or options.keep_chat_template):
        raise typer.BadParameter(
            "remove --method and --keep-chat-template: --keep-vocabulary and --prune-to copy rows and keep the template"
        )
    if options.method == "omp" and not options.donor:
        raise typer.BadParameter("--method omp needs --donor, a model that has the new tokenizer")
    for name, method in (("donor", "omp"), ("projection", "projection")):
        if getattr(options, name) and options.method != method:
            raise typer.BadParameter(f"--{name} applies only to --method {method}; remove it or change --method")


@contextlib.contextmanager
def _pruned(old: Tokenizer, options: TransplantOptions, columns: dict[str, str]) -> Any:
    """Yield the pruned tokenizer, and the old id of each of its tokens."""
    from xtk.transplant.model_transplant import pruned_tokenizer
    from xtk.transplant.vocabulary_pruning import BpeVocabulary, choose_tokens, count_tokens

    vocabulary = BpeVocabulary(old)
    counts = None
    if options.keep_vocabulary:
        from xtk.data.corpus_reader import Corpus

        counts = count_tokens(old, Corpus(options.keep_vocabulary, columns, options.max_document_bytes))
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, counts, options.prune_to or None))
    with pruned_tokenizer(files, f"{old.name}, pruned") as new:
        yield new, kept


def _bits_per_byte(
    folder: Path, adapter: Path | None, tokenizer: Tokenizer, data: Any, options: TransplantOptions
) -> float:
    from xtk.errors import NonFiniteModelError
    from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
    from xtk.evaluation.generated_answers import NON_FINITE_HINT
    from xtk.models.backbone_with_head import BackboneWithHead
    from xtk.models.causal_lm import default_device, load_causal_lm
    from xtk.models.resolver import ModelRef

    ref = ModelRef(folder, adapter, trust_remote_code=options.trust_remote_code)
    model = load_causal_lm(ref, device=default_device())
    bits = evaluate_bits_per_byte(BackboneWithHead(model), tokenizer, data).bits_per_byte
    if not math.isfinite(bits):
        raise NonFiniteModelError(
            "the model gives log-probabilities that are not finite", where=str(folder), hint=NON_FINITE_HINT
        )
    return bits


def _note_template(config: TransplantConfig) -> None:
    """Print a note if the chat template is lost, or uses text that is not a special token any more."""
    had, has = config.old.template_fingerprint, config.new.template_fingerprint
    if had is not None and has is None and not config.keep_chat_template:
        terminal.note(
            "transplant: the new tokenizer has no chat template; use --keep-chat-template to keep that of the model"
        )
    if config.keep_chat_template and had is not None:
        template = config.old.to_files()["chat_template.jinja"].decode()
        lost = [
            name
            for name in config.old.vocabulary.special_tokens
            if name in template and name not in config.new.vocabulary.special_tokens
        ]
        if lost:
            terminal.note(
                f"warning: the chat template of the model has {', '.join(lost)}, which is ordinary text for the new "
                "tokenizer; use a tokenizer with these special tokens, or its own template"
            )


def _note_report(record: dict[str, Any]) -> None:
    """Print how many tokens of each category are copied, composed and unknown, and bits per byte."""
    rows = [["category", "tokens", *KINDS]]
    for name, figures in [*record["categories"].items(), ("all", record)]:
        rows.append([name, *(f"{figures[kind]:,}" for kind in ("tokens", *KINDS))])
    for line in plain_lines(rows, [False] + [True] * (1 + len(KINDS))):
        terminal.note(line)
    if "bits_per_byte" in record:
        bits = record["bits_per_byte"]
        terminal.note(f"bits per byte: {bits['before']:.4f} before, {bits['after']:.4f} after")
