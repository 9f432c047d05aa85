"""`xtk export`: a finished student as a Hugging Face model folder."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import shared_options


def export(
    run: Annotated[
        str,
        typer.Argument(
            help="Output folder of xtk distill, or one of its checkpoints; - for standard input.", metavar="RUN"
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Output folder of the model.", metavar="FOLDER")],
    checkpoint: Annotated[
        int,
        typer.Option(help="Step of the checkpoint to export; 0: the finished student.", min=0, metavar="STEP"),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the exported weights. Default: that of the training.",
            metavar="[float32|bfloat16|float16]",
        ),
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option(help="Maximum size of a weight file, such as 5GB.", metavar="SIZE")
    ] = "5GB",
    evaluation: Annotated[
        list[str] | None,
        typer.Option(
            help="Results for the model card: output of xtk evaluate --json or lm-evaluation-harness. Repeatable.",
            metavar="FILE",
        ),
    ] = None,
    gguf: Annotated[
        str, typer.Option(help="Also write model.gguf with this weight type: f16, bf16 or q8_0.", metavar="TYPE")
    ] = "",
    gguf_converter: Annotated[
        str,
        typer.Option(help="Path of llama.cpp's convert_hf_to_gguf.py. Default: the one on the PATH.", metavar="PATH"),
    ] = "",
    push_to_hub: Annotated[
        str,
        typer.Option(
            help="Hugging Face repository to upload the folder to; uses the token of hf auth login.",
            metavar="OWNER/NAME",
        ),
    ] = "",
    trust_remote_code: shared_options.TrustRemoteCode = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Write a finished student as a Hugging Face model folder.

    Adapters are merged into the weights. The folder has tokenizer, chat template, generation config and model card. A
    checkpoint of a run with --ema-decay is exported with its averaged weights.

    Examples:
        xtk export run -o exported
        xtk export run --checkpoint 500 --dtype bfloat16 --push-to-hub me/student -o exported
    """
    from pathlib import Path

    terminal.set_quiet(quiet)
    place = Path(terminal.path_argument(run))

    from xtk.artifacts.run_folders import run_and_step_of_checkpoint
    from xtk.training.student_export import ExportConfig, check_hub_access, upload_to_hub
    from xtk.training.student_export import export_student as write

    if (of := run_and_step_of_checkpoint(place)) is not None:
        place, step = of
        if checkpoint not in (0, step):
            raise typer.BadParameter(
                f"remove --checkpoint {checkpoint}: it contradicts RUN, which is the checkpoint of step {step}"
            )
        checkpoint = step

    if push_to_hub:
        check_hub_access(push_to_hub)
    wanted = ExportConfig(
        place, checkpoint, dtype, max_shard_size, tuple(map(Path, evaluation or ())), gguf, gguf_converter
    )
    record = write(wanted, Path(output), force=force, trust_remote_code=trust_remote_code)
    if push_to_hub:
        terminal.note(f"export: {upload_to_hub(Path(output), push_to_hub)}")
    figures = {key: record[key] for key in ("steps", "dtype", "parameters", "shards", "bytes", "eos_token_ids")}
    terminal.result_artifact({"path": output, "kind": record["kind"], **figures}, as_json=as_json)
