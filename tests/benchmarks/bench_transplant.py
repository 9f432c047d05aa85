"""Time and memory of `xtk transplant` to Qwen's 151,646 tokens, in a new process, with `subword` and `omp`.

The model has the shape of SmolLM2-135M (30 layers, 576 columns), GPT-2's tokenizer and random weights; the donor
has 896 columns. With random rows, matching pursuit uses all of its atoms.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from measurement import model_folder, real_data, report, run_process
from transformers import LlamaConfig, LlamaForCausalLM

MODEL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3}  # fmt: skip
DONOR = {"hidden_size": 896, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 14,
         "num_key_value_heads": 2}  # fmt: skip


def random_model(vocab_size: int, shape: dict[str, int]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, **shape))


def main() -> None:
    """Measure and print."""
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = model_folder(folder / "model", "gpt2", random_model(50_257, MODEL))
        donor = model_folder(folder / "donor", "qwen", random_model(151_936, DONOR))
        rows = []
        for method, options, target in (("subword", [], "60 s"), ("omp", ["--donor", str(donor)], "600 s")):
            command = [sys.executable, "-m", "xtk", "transplant", str(model), str(real_data() / "tokenizers" / "qwen"),
                       "--method", method, *options, "-o", str(folder / method)]  # fmt: skip
            seconds, memory, _ = run_process(*command)
            weights = (model / "model.safetensors").stat().st_size / 2**30
            label = f"transplant with `{method}`; peak memory (weights of the model: {weights:.1f} GiB)"
            rows.append((label, f"{seconds:.0f} s; {memory:.1f} GiB", target))
    report(__file__, rows)


if __name__ == "__main__":
    main()
