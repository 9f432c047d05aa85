"""Cost of a checkpoint's checksums: writing it with and without them, and comparing them on resume.

A Llama with random weights after one step of AdamW, one process. Checkpoints are written alternately with and without
checksums: the fastest of each, in wall time (fsync included: checksums are computed while the disk writes) and in CPU
time. Other load on the machine makes some repetitions slower, and none faster.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measurement import median_seconds, report
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from xtk.runs import checkpoint
from xtk.runs.checkpoint import CheckpointSaver
from xtk.runs.folder import read_run_manifest, verify_files

REPEATS = 9
SIZES = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 4, "num_attention_heads": 10}


def trained_model(layers: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": layers}, vocab_size=32000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def without_checksums(folder: Path, names: Any) -> dict[str, dict[str, Any]]:
    """Replacement of `file_entries` that computes no checksums."""
    return {name: {"bytes": (folder / name).stat().st_size, "checksum": ""} for name in names}


def main() -> None:
    disable_progress_bar()
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES["num_hidden_layers"]
    model, optimizer = trained_model(layers)
    with_checksums = checkpoint.file_entries
    wall, cpu = [], []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = Path(temporary)
        saver = CheckpointSaver(model, optimizer, folder / "no-tokenizer")
        for repeat in range(REPEATS + 1):
            seconds = {}
            for name, entries in (("without", without_checksums), ("with", with_checksums)):
                checkpoint.file_entries = entries
                started, cpu_started = time.perf_counter(), time.process_time()
                saver.write_checkpoint(folder, 1, {})
                seconds[name] = time.perf_counter() - started, time.process_time() - cpu_started
            if repeat:
                wall.append((seconds["without"][0], seconds["with"][0]))
                cpu.append((seconds["without"][1], seconds["with"][1]))
        checkpoint_folder = folder / "checkpoint-1"
        manifest = read_run_manifest(checkpoint_folder)
        size = sum(path.stat().st_size for path in checkpoint_folder.rglob("*.safetensors")) / 2**30
        compare_seconds = median_seconds(lambda: verify_files(checkpoint_folder, manifest), 3)
    rows = [("comparing all checksums", f"{compare_seconds:.2f} s", f"{size:.2f} GiB")]
    for name, pairs in (("writing it, wall time", wall), ("writing it, processor time", cpu)):
        without, with_checksum = (min(column) for column in zip(*pairs, strict=True))
        rows.append(
            (
                name,
                f"{with_checksum:.2f} s, {without:.2f} s without checksums",
                f"{100 * (with_checksum / without - 1):+.1f} %",
            )
        )
    report(__file__, rows, ("a checkpoint", "measured", "size, or cost"))


if __name__ == "__main__":
    main()
