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
        "Distill pretrained models, which are downloaded (590 MB). Needs `pip install gguf`.",
    )


def quickstart(options: QuickstartOptions) -> None:
    """Distill a small student across tokenizers on a CPU.

    Trains two tokenizers and a teacher on Python's documentation and runs xtk commands, which are printed. Ends with
    a table of held-out bits per byte (teacher, student trained with cross-entropy only, distilled student) and with
    generated samples. Takes about five minutes on two CPU cores. With --real, SmolLM2-135M-Instruct learns functions of
    Python's standard library from Qwen2.5-Coder-0.5B-Instruct, in about 20 minutes.

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
