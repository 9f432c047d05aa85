"""A process of a run, or one of several: writes losses and gradients of a step that is split in several ways.

    python gradient_dump_process.py CASES

CASES is JSON with `student`, `output` and `cases`. Each case has a `name`, `caches`, `projections`, `losses`, `options`
of the training configuration and `ways`. Optional are a separate `student`, and caches `held_out`, which are evaluated
in a context of `context` tokens. Each way, DOCUMENTS:BATCH, takes two steps of DOCUMENTS documents over all processes,
in forward passes of BATCH documents; the ways whose DOCUMENTS is `moved` then take five steps that update the weights.
The first process writes OUTPUT/NAME-DOCUMENTS-BATCH.safetensors and OUTPUT/results.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from recorded_training_steps import make_train_config, open_run_inputs, record_steps
from safetensors.torch import save_file


def main() -> None:
    cases = json.loads(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    output = Path(cases["output"])
    results: dict[str, dict[str, object]] = {}
    for case in cases["cases"]:
        student = Path(case.get("student") or cases["student"])
        inputs = open_run_inputs(
            student,
            case["caches"],
            make_train_config(case["losses"], **case["options"]),
            tuple(map(Path, case["projections"])),
            tuple(map(Path, case.get("held_out", []))),
        )
        for way in case["ways"]:
            documents, batch = map(int, way.split(":"))
            recipe = make_train_config(case["losses"], batch, learning_rate=1e-3, **case["options"])
            gradients, way_results = record_steps(
                accelerator, student, inputs, recipe, documents, context=case.get("context", 256),
                num_updates=5 * (documents == case.get("moved")),
            )  # fmt: skip
            results.setdefault(case["name"], {})[way] = way_results
            if accelerator.is_main_process:
                save_file(gradients, output / f"{case['name']}-{documents}-{batch}.safetensors")
    if accelerator.is_main_process:
        (output / "results.json").write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main()
