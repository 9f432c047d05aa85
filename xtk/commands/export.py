"""`xtk export`: a student as transformers, vLLM and the hub read it."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import shared_options


def export(
    run: Annotated[
        str, typer.Argument(help="What xtk distill wrote, or a checkpoint in it; - for a pipe.", metavar="RUN")
    ],
    output: shared_options.Output,
    checkpoint: Annotated[
        int,
        typer.Option(help="The step of one of its checkpoints; 0: the finished student.", min=0, metavar="STEP"),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(help="Of the weights; left out: that of the training.", metavar="[float32|bfloat16|float16]"),
    ] = "",
    max_shard_size: Annotated[str, typer.Option(help="Of a file of weights.", metavar="SIZE")] = "5GB",
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            help="Results for the card: what xtk evaluate --json printed, or a results file of lm-evaluation-harness. "
            "Repeat it for more.",
            metavar="FILE",
        ),
    ] = None,
    gguf: Annotated[
        str, typer.Option(help="Also write model.gguf, with numbers of this type: f16, bf16, q8_0.", metavar="TYPE")
    ] = "",
    gguf_converter: Annotated[
        str,
        typer.Option(help="llama.cpp's convert_hf_to_gguf.py, where it is not on the path.", metavar="PATH"),
    ] = "",
    push_to_hub: Annotated[
        str, typer.Option(help="Upload it there too, with the token of hf auth login.", metavar="OWNER/NAME")
    ] = "",
    trust_remote_code: shared_options.TrustRemoteCode = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Write a student's Hugging Face folder: whole weights, tokenizer and template, generation config, model card.

    Adapters are merged, also those of checkpoints; where the run averages weights, a checkpoint's average is taken.
    """
    from pathlib import Path

    terminal.set_quiet(quiet)
    place = Path(terminal.path_argument(run))

    from xtk.artifacts.run_folders import run_and_step_of_checkpoint
    from xtk.training.export_student import ExportConfig, check_hub_access, upload_to_hub
    from xtk.training.export_student import export_student as write

    if (of := run_and_step_of_checkpoint(place)) is not None:
        place, step = of
        if checkpoint not in (0, step):
            raise typer.BadParameter(f"--checkpoint is {checkpoint}, and RUN is the checkpoint of step {step}")
        checkpoint = step

    if push_to_hub:
        check_hub_access(push_to_hub)
    wanted = ExportConfig(
        place, checkpoint, dtype, max_shard_size, tuple(map(Path, evaluation or ())), gguf, gguf_converter
    )
    told = write(wanted, Path(output), force=force, trust_remote_code=trust_remote_code)
    if push_to_hub:
        terminal.note(f"export: {upload_to_hub(Path(output), push_to_hub)}")
    figures = {key: told[key] for key in ("steps", "dtype", "parameters", "shards", "bytes", "eos_token_ids")}
    terminal.result_artifact({"path": output, "kind": told["kind"], **figures}, as_json=as_json)
