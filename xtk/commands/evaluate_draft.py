"""`xtk evaluate-draft`: acceptance and speed-up of a draft model in speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.commands.evaluate_answers import EvaluateAnswersOptions
from xtk.commands.evaluated_models import (
    LoadedModelOptions,
    ModelFolders,
    difference_heading,
    load_model_and_tokenizer,
)
from xtk.errors import XtkError
from xtk.options.declaration import (
    REQUIRED,
    CommandOptions,
    Heading,
    argument,
    flags_of_set_options,
    option,
    options_of,
    redeclared,
)
from xtk.options.shared import (
    ConfigOption,
    CorpusOptions,
    ForceOption,
    JsonOption,
    PromptOptions,
    QuietOption,
    SamplingOptions,
)
from xtk.terminal_tables import format_with_error, print_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from xtk.evaluation.draft_acceptance import BlockSizeMeasures, StepCosts
    from xtk.evaluation.speculative_decoding import SpeculativeDecoder
    from xtk.text.tokenizer import Tokenizer

MAX_DRAFT_TOKENS, MAX_COST_RATIO = 100, 1000.0
Table = tuple[str, list[str], list[list[str]]]  # title, column titles, rows


@dataclass(frozen=True, kw_only=True)
class EvaluateDraftOptions(
    PromptOptions, CorpusOptions, LoadedModelOptions, ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions
):
    """Options of `xtk evaluate-draft`."""

    MAIN_OPTIONS = (
        "num_draft_tokens", "compare_to", "max_completion_length", "temperature", "max_prompts", "columns",
        "apply_chat_template", "cost_ratios", "dtype", "html", "as_json",
    )  # fmt: skip
    HEADINGS = (
        Heading("Prompts", (CorpusOptions, "max_prompts", PromptOptions)),
        Heading("Generation", ("num_draft_tokens", "max_completion_length", "temperature", "top_p", "top_k", "seed")),
        Heading("Results", ("compare_to", "cost_ratios", "html")),
        Heading("Models", (LoadedModelOptions,)),
    )

    draft: str = argument(REQUIRED, "Draft model: a folder, a GGUF file or a hub id.", metavar="DRAFT")
    target: str = argument(
        REQUIRED, "Target model, with the same vocabulary: a folder, a GGUF file or a hub id.", metavar="TARGET"
    )
    prompts: tuple[str, ...] = argument(
        REQUIRED, "Prompts. docs/how-to/data.md lists the formats.", metavar="PROMPTS..."
    )
    num_draft_tokens: tuple[str, ...] = option(
        ("1", "2", "4", "8"),
        "Tokens that the draft proposes at once; each number is measured separately.",
        metavar="K,...",
        comma_separated=True,
    )
    compare_to: tuple[str, ...] = option(
        (),
        "Another draft to measure on the same prompts; reports DRAFT minus OTHER, paired by prompt. Repeatable.",
        metavar="OTHER",
    )
    max_completion_length: int = redeclared(
        SamplingOptions,
        "max_completion_length",
        128,
        help="Maximum number of tokens per completion; the last block is complete.",
    )
    temperature: float = redeclared(SamplingOptions, "temperature", 0.0)
    top_p: float = redeclared(SamplingOptions, "top_p")
    top_k: int = redeclared(SamplingOptions, "top_k")
    seed: int = redeclared(EvaluateAnswersOptions, "seed")
    max_prompts: int = redeclared(
        EvaluateAnswersOptions, "max_prompts", help="Maximum number of prompts, taken from the start; 0: all."
    )
    cost_ratios: tuple[str, ...] = option(
        ("0.05", "0.1"),
        "Also compute the speed-up for these times of a draft step, as fractions of a target step.",
        metavar="C,...",
        comma_separated=True,
    )
    html: str = option("", "Also write the results as an HTML page with a picture.", metavar="FILE")


def evaluate_draft(options: EvaluateDraftOptions) -> None:
    """Measure a draft model in speculative decoding: acceptance, accepted length, speed-up.

    The draft proposes blocks of tokens, the target verifies them; the text has the target's distribution. Speed is
    measured with both models in transformers, one prompt at a time.

    Examples:
        xtk evaluate-draft ./draft ./target prompts.jsonl --apply-chat-template
        xtk evaluate-draft ./draft ./target prompts.jsonl --compare-to ./start --temperature 0.8
    """
    terminal.set_quiet(options.quiet)
    if options.temperature == 0 and (flags := flags_of_set_options(options, ["top_p", "top_k"])):
        raise typer.BadParameter(f"--temperature 0 does not sample; remove {' and '.join(flags)}")
    numbers = _numbers(options.num_draft_tokens, "--num-draft-tokens", MAX_DRAFT_TOKENS)
    if not all(number.is_integer() for number in numbers):
        raise typer.BadParameter("--num-draft-tokens needs whole numbers, such as 1,2,4,8")
    sizes = [int(number) for number in numbers]
    ratios = _numbers(options.cost_ratios, "--cost-ratios", MAX_COST_RATIO)
    request = _page_request(options)
    prompts, decoders, tokenizer = _load(options, sizes[-1])
    record = _measured(options, prompts, decoders, tokenizer, sizes, ratios)
    tables = _tables(record, ratios)
    summary = _summary(record)
    if options.html:
        from xtk.pages.draft_html import draft_page
        from xtk.pages.html_page import write_page

        write_page(Path(options.html), draft_page(record, summary, tables, request))
    if options.as_json:
        terminal.result_json(record)
        return
    for table in tables:
        print_table(*table)
    terminal.result_line(summary)


def _numbers(texts: tuple[str, ...], flag: str, high: float) -> list[float]:
    """Return the numbers of a list in ascending order, each once."""
    try:
        values = sorted({float(text) for text in texts})
    except ValueError:
        values = []
    if not values or not (0 < values[0] <= values[-1] <= high):
        raise typer.BadParameter(f"{flag} {','.join(texts)!r} is not a list of numbers above 0 and at most {high:g}")
    return values


def _page_request(options: EvaluateDraftOptions) -> str:
    """Return the fingerprint of a page of these options, after a check that --html can be written."""
    import dataclasses

    from xtk.files.atomic_files import canonical_json, sha256

    if not options.html:
        return ""
    from xtk.files.output import Output
    from xtk.pages.html_page import PAGE

    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in ("force", "quiet")}
    request = sha256(canonical_json(values))
    inputs = [options.draft, *options.compare_to, options.target, *options.prompts]
    Output(Path(options.html), PAGE, force=options.force, inputs=inputs).find_finished(request)
    return request


def _load(
    options: EvaluateDraftOptions, largest: int
) -> tuple[list[tuple[NDArray[np.int32], int]], list[SpeculativeDecoder], Tokenizer]:
    """Return the prompts with the maximum lengths of their completions, a decoder per draft, the target's tokenizer."""
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.evaluation.speculative_decoding import CachedModel, SpeculativeDecoder
    from xtk.models.causal_lm import max_context_length
    from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
    from xtk.rollouts.engine_request_checks import max_new_tokens
    from xtk.rollouts.generator_interface import GenerationRequest, SamplingConfig
    from xtk.rollouts.prompts import (
        PromptFormat,
        read_prompt_template,
        read_prompts,
        read_template_arguments,
        tokenize_prompts,
    )

    folders: dict[str, ModelFolders] = {
        name: base_model_and_adapter(resolve_model_folder(name, with_weights=True))
        for name in (options.target, options.draft, *options.compare_to)
    }
    tokenizer = _shared_tokenizer(options, folders)
    corpus = Corpus(options.prompts, parse_columns_option(options.columns), options.max_document_bytes)
    form = PromptFormat(read_prompt_template(options.prompt_template), as_chat=options.apply_chat_template)
    documents = [prompt.document for prompt in read_prompts(corpus, options.max_prompts or None, form)]
    if not documents:
        raise XtkError("the data has no prompt", where=", ".join(options.prompts), hint="add prompts")
    arguments = read_template_arguments(options.chat_template_kwargs)
    token_lists = tokenize_prompts(tokenizer, documents, arguments)
    sampling = options_of(SamplingConfig, options)
    models = [load_model_and_tokenizer(name, folders[name], options)[0].eval() for name in folders]
    limits = [limit for model in models if (limit := max_context_length(model.config)) is not None]
    context = min(limits) - largest if limits else None
    lengths = [max_new_tokens(GenerationRequest(ids, ()), sampling, context, options.target) for ids in token_lists]
    target, *drafts = (CachedModel(model, len(tokenizer)) for model in models)
    decoders = [SpeculativeDecoder(target, draft, sampling, tokenizer.stop_ids) for draft in drafts]
    return list(zip(token_lists, lengths, strict=True)), decoders, tokenizer


def _shared_tokenizer(options: EvaluateDraftOptions, folders: dict[str, ModelFolders]) -> Tokenizer:
    """Return the target's tokenizer, after checks without reading weights."""
    from xtk.models.causal_lm import check_loadable
    from xtk.models.resolver import ModelRef
    from xtk.text.tokenizer import Tokenizer

    drafts = (options.draft, *options.compare_to)
    if options.target in drafts:
        raise XtkError(
            "DRAFT and TARGET name the same model", where=options.target, hint="give a smaller model as DRAFT"
        )
    if len(set(drafts)) < len(drafts):
        raise XtkError("a draft is given twice", where=", ".join(drafts), hint="remove one of them")
    tokenizers = {}
    for name, (folder, adapter) in folders.items():
        tokenizers[name] = Tokenizer(folder, name=name, start_token=options.start_token, adapter=adapter)
        check_loadable(ModelRef(folder, adapter, trust_remote_code=options.trust_remote_code), tokenizers[name])
    target = tokenizers[options.target].vocabulary
    for name in drafts:
        draft = tokenizers[name].vocabulary
        if target.bytes_by_id != draft.bytes_by_id or target.special_tokens != draft.special_tokens:
            raise XtkError(
                f"the draft has another vocabulary than the target: {len(draft):,} and {len(target):,} tokens",
                where=f"{name}, {options.target}",
                hint=f"give the draft the target's tokenizer: xtk transplant {name} {options.target} -o DRAFT; "
                "docs/how-to/draft-models.md",
            )
    return tokenizers[options.target]


def _measured(
    options: EvaluateDraftOptions,
    prompts: list[tuple[NDArray[np.int32], int]],
    decoders: list[SpeculativeDecoder],
    tokenizer: Tokenizer,
    sizes: list[int],
    ratios: list[float],
) -> dict[str, Any]:
    """Return the JSON record."""
    from xtk.evaluation.draft_acceptance import measure_drafts

    token_lists, lengths = zip(*prompts, strict=True)
    measured = measure_drafts(decoders, token_lists, sizes, lengths, options.seed)
    names = (options.draft, *options.compare_to)
    records = [_draft_record(name, *results, tokenizer, ratios) for name, results in zip(names, measured, strict=True)]
    for (blocks, _), record in zip(measured[1:], records[1:], strict=True):
        for block, first, block_record in zip(blocks, measured[0][0], record["block_sizes"], strict=True):
            difference = first.acceptance_minus(block)
            block_record["acceptance_difference"] = difference.value
            block_record["acceptance_difference_error"] = difference.finite_error
    return {
        "target": options.target,
        "data": options.prompts[0] if len(options.prompts) == 1 else list(options.prompts),
        **{name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")},
        "prompts": len(prompts),
        **records[0],
        "compared": records[1:],
    }


def _draft_record(
    name: str, blocks: list[BlockSizeMeasures], costs: StepCosts, tokenizer: Tokenizer, ratios: list[float]
) -> dict[str, Any]:
    """Return the JSON record of one draft."""
    from xtk.evaluation.draft_acceptance import failures_by_category

    categories = failures_by_category([text for block in blocks for text in block.completions], tokenizer)
    records = [block.to_json(costs, ratios) for block in blocks]
    best = max(records, key=lambda one: one["speed_up"])
    return {
        "draft": name,
        "tokens": sum(len(text.ids) for block in blocks for text in block.completions),
        "draft_step_seconds": costs.draft,
        "target_step_seconds": costs.target,
        "cost_ratio": costs.ratio,
        "block_sizes": records,
        "best_num_draft_tokens": best["num_draft_tokens"] if best["speed_up"] > 1 else 0,
        "categories": {
            category: {"verified": verified, "rejected": rejected}
            for category, (verified, rejected) in categories.items()
        },
    }


def _tables(record: dict[str, Any], ratios: list[float]) -> list[Table]:
    """Return the tables: by block size, by position in the block, by text category."""
    blocks = record["block_sizes"]
    heads = ["draft tokens", "acceptance", "accepted length", "speed-up, measured", "expected", "verification cost",
             "break-even acceptance"]  # fmt: skip
    heads += [f"{what} at cost ratio {ratio:g}" for ratio in ratios for what in ("expected", "break-even")]
    rows = []
    for block in blocks:
        row = [str(block["num_draft_tokens"])]
        row += [
            format_with_error(block[name], block[f"{name}_error"])
            for name in ("acceptance", "accepted_length", "speed_up")
        ]
        row += [f"{block['expected_speed_up']:.2f}", f"{block['verification_cost']:.2f}", _acceptance(block)]
        for ratio in ratios:
            by_ratio = block["by_cost_ratio"][f"{ratio:g}"]
            row += [f"{by_ratio['expected_speed_up']:.2f}", _acceptance(by_ratio)]
        rows.append(row)
    positions = [
        [str(at + 1), *(_position(block, at) for block in blocks)] for at in range(blocks[-1]["num_draft_tokens"])
    ]
    total = sum(counts["verified"] for counts in record["categories"].values())
    categories = [
        [name, f"{counts['verified'] / total:.1%}", f"{counts['rejected'] / counts['verified']:.1%}"]
        for name, counts in record["categories"].items()
    ]
    title = f"{record['draft']} as a draft of {record['target']}, {record['prompts']:,} prompts"
    return [
        (title, heads, rows),
        *_comparison(record),
        ("acceptance by position in the block",
         ["position", *(f"{block['num_draft_tokens']} draft tokens" for block in blocks)], positions),
        ("rejected proposals by text category", ["category", "% of proposals", "rejected"], categories),
    ]  # fmt: skip


def _comparison(record: dict[str, Any]) -> list[Table]:
    """Return a table of all drafts by block size, if there are several."""
    rows = [
        [
            draft["draft"],
            str(block["num_draft_tokens"]),
            *(format_with_error(block[name], block[f"{name}_error"]) for name in ("acceptance", "accepted_length")),
            format_with_error(block["speed_up"], block["speed_up_error"]),
            format_with_error(block["acceptance_difference"], block["acceptance_difference_error"])
            if "acceptance_difference" in block
            else "",
        ]
        for draft in (record, *record["compared"])
        for block in draft["block_sizes"]
    ]
    drafts = [draft["draft"] for draft in (record, *record["compared"])]
    heads = ["draft", "draft tokens", "acceptance", "accepted length", "speed-up", difference_heading(drafts)]
    return [("comparison on the same prompts", heads, rows)] if record["compared"] else []


def _acceptance(figures: dict[str, Any]) -> str:
    value = figures["break_even_acceptance"]
    return "never" if value is None else f"{value:.3f}"


def _position(block: dict[str, Any], at: int) -> str:
    if at >= block["num_draft_tokens"] or block["acceptance_by_position"][at] is None:
        return ""
    return format_with_error(block["acceptance_by_position"][at], block["acceptance_by_position_error"][at])


def _summary(record: dict[str, Any]) -> str:
    """Return the costs and the best block size in words."""
    best, draft, target = (
        record[name] for name in ("best_num_draft_tokens", "draft_step_seconds", "target_step_seconds")
    )
    text = f"a draft step costs {record['cost_ratio']:.3f} target steps ({draft * 1e3:.1f} ms, {target * 1e3:.1f} ms); "
    if not best:
        return text + "no block size is faster than the target alone on this machine"
    return text + f"best on this machine: {best} draft tokens"
