"""Reads models and tokenizers with transformers 4, in the separate environment of `nox -s compatibility`."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


@torch.no_grad()
def read(folder: Path) -> None:
    """Write the logits of ids.npy to logits.npy, and the tokens of texts.json, if there are texts, to tokens.json."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    np.save(folder / "logits.npy", model.eval()(torch.from_numpy(np.load(folder / "ids.npy"))).logits.numpy())
    if (folder / "texts.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        (folder / "tokens.json").write_text(json.dumps([tokenizer(text).input_ids for text in texts]))


if __name__ == "__main__":
    print(transformers.__version__)
    for path in sorted(Path(sys.argv[1]).iterdir()):
        try:
            read(path)
        except Exception:
            (path / "error.txt").write_text(traceback.format_exc()[-3000:])
