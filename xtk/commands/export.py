"""`xtk export`: a finished student as a Hugging Face model folder."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option, output_option
from xtk.options.shared import ConfigOption, ForceOption, JsonOption, QuietOption, TrustRemoteCodeOption


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrustRemoteCodeOption, ForceOption, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk export`."""

    run: str = argument(
        REQUIRED, "Output folder of xtk distill, or one of its checkpoints; - for standard input.", metavar="RUN"
    )
    output: str = output_option("Output folder of the model.", "FOLDER")
    checkpoint: int = option(0, "Step of the checkpoint to export; 0: the finished student.", metavar="STEP", min=0)
    dtype: str = option(
        "", "Data type of the exported weights. Default: that of the training.", metavar="[float32|bfloat16|float16]"
    )
    max_shard_size: str = option("5GB", "Maximum size of a weight file, such as 5GB.", metavar="SIZE")
    evaluation: tuple[str, ...] = option(
        (),
        "Results for the model card: output of xtk evaluate --json or lm-evaluation-harness. Repeatable.",
        metavar="FILE",
    )
    push_to_hub: str = option(
        "", "Hugging Face repository to upload the folder to; uses the token of hf auth login.", metavar="OWNER/NAME"
    )


def export(options: ExportOptions) -> None:
    """Write a finished student as a Hugging Face model folder.

    Adapters are merged into the weights. The folder has tokenizer, chat template, generation config and model card. A
    checkpoint of a run with --ema-decay is exported with its averaged weights.

    Examples:
        xtk export run -o exported
        xtk export run --checkpoint 500 --dtype bfloat16 --push-to-hub me/student -o exported
    """
    from pathlib import Path

    terminal.set_quiet(options.quiet)
    place = Path(terminal.path_argument(options.run))

    from xtk.publish.student_export import ExportConfig, check_hub_access, upload_to_hub
    from xtk.publish.student_export import export_student as write
    from xtk.runs.folder import run_and_step_of_checkpoint

    checkpoint = options.checkpoint
    if (of := run_and_step_of_checkpoint(place)) is not None:
        place, step = of
        if checkpoint not in (0, step):
            raise typer.BadParameter(
                f"remove --checkpoint {checkpoint}: it contradicts RUN, which is the checkpoint of step {step}"
            )
        checkpoint = step

    if options.push_to_hub:
        check_hub_access(options.push_to_hub)
    wanted = ExportConfig(
        place,
        checkpoint,
        options.dtype,
        options.max_shard_size,
        tuple(map(Path, options.evaluation)),
    )
    record = write(wanted, Path(options.output), force=options.force, trust_remote_code=options.trust_remote_code)
    if options.push_to_hub:
        terminal.note(f"export: {upload_to_hub(Path(options.output), options.push_to_hub)}")
    figures = {key: record[key] for key in ("steps", "dtype", "parameters", "shards", "bytes", "eos_token_ids")}
    terminal.result_artifact({"path": options.output, "kind": record["kind"], **figures}, as_json=options.as_json)
