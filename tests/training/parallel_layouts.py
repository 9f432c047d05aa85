"""Parallel layouts, and the losses, gradients and weights after five steps that processes compute in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import small_inputs
import torch
from safetensors.torch import load_file

LOSSES = "ce:weight=0.5 p-kl boundary-kl:weight=0.25 byte-kl:weight=2 alm uld:weight=0.5 gold h-kl:weight=0.25"
# DOCUMENTS:BATCH by number of processes: documents of a step over all processes, documents of a forward pass.
STEP_SPLITS = {1: ["8:2", "5:5"], 2: ["8:4", "5:5"], 3: ["5:2"], 4: ["8:2", "5:2"], 8: ["8:2"]}
UPDATED_DOCUMENTS = 5  # DOCUMENTS of the ways that also take five steps that update the weights
LORA = {"lora_r": 4}
SHORT_LAYOUTS: dict[int, list[dict[str, Any]]] = {
    # Each document has more than 10 tokens.
    1: [{}, {"max_batch_tokens": 100}, {"max_batch_tokens": 10}, {"max_batch_tokens": 100, "packing": False},
        {"gradient_checkpointing": True}],
    2: [
        {"parallel": "fsdp=2"},
        {"parallel": "fsdp=2", "fsdp_offload": True, "max_batch_tokens": 70},
        {"parallel": "tp=2"},
        {"parallel": "cp=2", "max_batch_tokens": 90, "gradient_checkpointing": True},
        LORA,
        {**LORA, "parallel": "fsdp=2"},
    ],
}  # fmt: skip
LONG_LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"parallel": "cp=2"}, {**LORA, "parallel": "cp=2"}],
    3: [{"parallel": "cp=3"}, {"parallel": "fsdp=3"}],
    4: [
        {"parallel": "tp=2,cp=2", "max_batch_tokens": 90},
        {"parallel": "fsdp=2,tp=2"},
        {"parallel": "dp=2,tp=2", "gradient_checkpointing": True},
        {"parallel": "dp=2,fsdp=2"},
        {"parallel": "fsdp=2,cp=2"},
        {"parallel": "cp=2"},
        {**LORA, "parallel": "dp=2,fsdp=2"},
    ],
    8: [{"parallel": "dp=2,tp=2,cp=2"}, {"parallel": "fsdp=2,tp=2,cp=2"}, {"parallel": "dp=2,fsdp=2,cp=2"}],
}
STUDENTS = ("llama", "tied")
CONTEXT = 24  # maximum tokens of held-out documents; some of them are longer

Case = tuple[str, dict[str, Any]]


def make_students(folder: Path) -> dict[str, Path]:
    """Write a Llama and a Qwen3 with tied embeddings; their 657 rows do not divide evenly over 2, 4 or 8 processes."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    size = {"vocab_size": 657, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, **size)),
        "tied": lambda: Qwen3ForCausalLM(
            Qwen3Config(hidden_size=48, intermediate_size=96, head_dim=16, tie_word_embeddings=True, **size)
        ),
    }
    for name, make in models.items():
        small_inputs.make_student_tokenizer(folder / name)
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
    return {name: folder / name for name in models}


def all_cases(layouts: Sequence[dict[str, Any]]) -> list[Case]:
    """Return each student with each layout; layouts with adapters are tested with the first student only."""
    return [
        (student, options)
        for student in STUDENTS
        for options in layouts
        if student == STUDENTS[0] or not options.keys() & LORA
    ]


def reference_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a layout is compared with: one process, one pass, one row per document."""
    return {"packing": False, **{name: value for name, value in options.items() if name in LORA}}


def case_name(student: str, options: Mapping[str, Any]) -> str:
    return " ".join([student, *(f"{name}={value}" for name, value in options.items())])


@dataclass(frozen=True)
class Difference:
    """The largest differences between a layout and one process.

    Attributes:
        loss: relative difference of any loss.
        gradient: of any parameter's gradient, divided by its largest absolute value.
        norm: relative difference of the gradient's norm.
        weights: of any parameter after five steps, divided by its largest absolute value; None without these steps.
    """

    loss: float
    gradient: float
    norm: float
    weights: float | None


@dataclass(frozen=True)
class LayoutResults:
    """Results of a number of processes, for all their cases and ways."""

    folder: Path
    results: dict[str, dict[str, Any]]

    def tensors(self, name: str, way: str) -> dict[str, torch.Tensor]:
        """Return gradients, and weights after five steps, named as in `take_steps`."""
        return load_file(self.folder / f"{name}-{way.replace(':', '-')}.safetensors")

    def difference(self, student: str, options: Mapping[str, Any], way: str, one_process: LayoutResults) -> Difference:
        """Return the differences from one process.

        Raises:
            AssertionError: the parameters are not the same ones, or a gradient is zero.
        """
        name, other, documents = (
            case_name(student, options),
            case_name(student, reference_options(options)),
            way.split(":")[0],
        )
        found_results, expected_results = (
            self.results[name][way],
            one_process.results[other][f"{documents}:{documents}"],
        )
        found, expected = self.tensors(name, way), one_process.tensors(other, f"{documents}:{documents}")
        assert expected.keys() == found.keys()
        largest: dict[str, float] = {}
        for parameter, values in expected.items():
            kind = "weights" if parameter.startswith("weights.") else "gradient"
            scale = float(values.abs().max())
            assert scale > 0, parameter
            largest[kind] = max(largest.get(kind, 0.0), float((found[parameter] - values).abs().max()) / scale)
        losses = [
            _relative_difference(one[loss], expected_results["losses"][step][loss])
            for step, one in enumerate(found_results["losses"])
            for loss in one
        ]
        norms = [
            _relative_difference(one, other)
            for one, other in zip(found_results["norms"], expected_results["norms"], strict=True)
        ]
        return Difference(max(losses), largest["gradient"], max(norms), largest.get("weights"))


def _relative_difference(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def run_cases(
    processes: int, requested_cases: Sequence[Case], cache: Path, students: Mapping[str, Path], folder: Path
) -> LayoutResults:
    """Start processes once, take steps in several layouts, and return the results."""
    common = {"caches": [str(cache)], "projections": [], "losses": LOSSES.split(" "), "held_out": [str(cache)],
              "context": CONTEXT, "moved": UPDATED_DOCUMENTS}  # fmt: skip
    request = {
        "output": str(folder),
        "cases": [
            {**common, "name": case_name(student, options), "student": str(students[student]), "options": options,
             "ways": ["8:8", "5:5"]
             if processes == 1 and options == reference_options(options)
             else STEP_SPLITS[processes]}
            for student, options in requested_cases
        ],
    }  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                "--nproc-per-node", str(processes)] if processes > 1 else []  # fmt: skip
    python_path = [str(Path(small_inputs.__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).parent / "gradient_dump_process.py"), json.dumps(request)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
             "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(python_path)},
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return LayoutResults(folder, json.loads((folder / "results.json").read_text()))


def reference_cases() -> list[Case]:
    """Return the cases of one process with which all others are compared."""
    return all_cases([reference_options({}), reference_options(LORA)])
