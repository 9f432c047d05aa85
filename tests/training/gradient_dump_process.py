"""A process of a run, or one of several: writes loss and gradient of a few ways to take the same step.

    python gradient_dump_process.py CASES

CASES is JSON: `student`, `output`, and `cases`, each with a `name`, `caches`, `projections`, `losses`, `options` of the
recipe and `ways`, and perhaps a `student` of its own, and caches `held_out` that are evaluated in a `context` of so
many tokens. Each way, DOCUMENTS:BATCH, takes two steps of so many documents, over all processes, in forward passes of
so many; those of `moved` documents then take five steps that move the weights. The first process writes
OUTPUT/NAME-DOCUMENTS-BATCH.safetensors and OUTPUT/told.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from recorded_training_steps import inputs_of, recipe_of, take_steps
from safetensors.torch import save_file


def main() -> None:
    cases = json.loads(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    output = Path(cases["output"])
    told: dict[str, dict[str, object]] = {}
    for case in cases["cases"]:
        student = Path(case.get("student") or cases["student"])
        inputs = inputs_of(
            student,
            case["caches"],
            recipe_of(case["losses"], **case["options"]),
            tuple(map(Path, case["projections"])),
            tuple(map(Path, case.get("held_out", []))),
        )
        for way in case["ways"]:
            documents, batch = map(int, way.split(":"))
            recipe = recipe_of(case["losses"], batch, learning_rate=1e-3, **case["options"])
            gradients, results = take_steps(
                accelerator, student, inputs, recipe, documents, context=case.get("context", 256),
                moved=5 * (documents == case.get("moved")),
            )  # fmt: skip
            told.setdefault(case["name"], {})[way] = results
            if accelerator.is_main_process:
                save_file(gradients, output / f"{case['name']}-{documents}-{batch}.safetensors")
    if accelerator.is_main_process:
        (output / "told.json").write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
