"""Reading input embeddings from model folders."""

from __future__ import annotations

import numpy as np
import pytest

from xtk.errors import CorruptError, XtkError
from xtk.models.safetensors_headers import read_input_embedding


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_input_embedding_is_read_from_a_model_folder(tmp_path, dtype):
    import torch
    from safetensors.torch import save_file

    torch_dtype = getattr(torch, dtype)
    matrix = torch.randn(7, 5).to(torch_dtype)
    tensors = {"model.embed_tokens.weight": matrix, "model.norm.weight": torch.ones(5), "lm_head.weight": -matrix}
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_input_embedding(tmp_path)
    assert found.dtype == np.float32
    assert found.tolist() == matrix.float().numpy().tolist()


def test_folders_without_a_readable_input_embedding_are_refused(tmp_path):
    with pytest.raises(XtkError, match="this folder contains no weights"):
        read_input_embedding(tmp_path)
    from safetensors.numpy import save_file

    save_file({"x": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(XtkError, match="no input embedding"):
        read_input_embedding(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(CorruptError):
        read_input_embedding(tmp_path)
    save_file({"wte.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    for size in (4, 40, len(raw) - 3):
        (tmp_path / "model.safetensors").write_bytes(raw[:size])
        with pytest.raises(CorruptError):
            read_input_embedding(tmp_path)
