"""Neighbours of embeddings, and where they are read from."""

from __future__ import annotations

import numpy as np
import pytest

from xtk.artifacts.embedding_weights import read_input_embedding
from xtk.errors import CorruptError, XtkError
from xtk.projection.build import build_projection


def row(projection, token):
    place = slice(projection.row_offsets[token], projection.row_offsets[token + 1])
    return dict(zip(projection.teacher_ids[place].tolist(), projection.weights[place].tolist(), strict=True))


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_a_rotated_copy_of_the_space_is_found_again(tokenizer_of):
    one, other = tokenizer_of["student"], tokenizer_of["teacher"]
    draw = np.random.default_rng(0)
    student = draw.normal(size=(one.embedding_rows, 24)).astype(np.float32)
    teacher = draw.normal(size=(other.embedding_rows, 24)).astype(np.float32)
    rotation = np.linalg.qr(draw.normal(size=(24, 24)))[0]
    wanted: dict[int, int] = {}
    free = iter([token for token, spelling in enumerate(other.vocabulary.bytes_by_id)
                 if spelling and spelling not in one.vocabulary.token_of_bytes])  # fmt: skip
    for token, spelling in enumerate(one.vocabulary.bytes_by_id):
        if spelling:
            target = other.vocabulary.token_of_bytes.get(spelling)
            target = next(free, None) if target is None else target
            if target is not None:
                wanted[token] = target
                teacher[target] = student[token] @ rotation + 3
    built = build_projection(one, other, "embedding", student_embedding=student, teacher_embedding=teacher,
                             num_neighbors=2, temperature=0.01)  # fmt: skip
    built.validate()
    assert len(wanted) > 300
    assert all(row(built, token).get(target, 0) > 0.9 for token, target in wanted.items())


def test_weights_agree_with_dense_cosines(tokenizer_of, options_of):
    one, other = tokenizer_of["student"], tokenizer_of["metaspace"]
    options = options_of("embedding", "student", "metaspace")
    built = build_projection(one, other, "embedding", num_neighbors=3, temperature=0.2, **options)
    left, right = options["student_embedding"].astype(float), options["teacher_embedding"].astype(float)
    table = other.vocabulary.token_of_bytes
    pairs = [(token, table[text]) for token, text in enumerate(one.vocabulary.bytes_by_id) if text in table]
    rows, columns = map(list, zip(*pairs, strict=True))
    left, right = left - left[rows].mean(0), right - right[columns].mean(0)
    u, _, v = np.linalg.svd(unit(left[rows]).T @ unit(right[columns]), full_matrices=False)
    cosines = unit(left @ u @ v) @ unit(right).T
    cosines[:, other.vocabulary.byte_lengths == 0] = -np.inf
    for token in set(np.flatnonzero(one.vocabulary.byte_lengths).tolist()) - set(rows):
        nearest = np.argsort(-cosines[token])[:3]
        weights = np.exp(cosines[token][nearest] / 0.2)
        expected = dict(zip(nearest.tolist(), (weights / weights.sum()).tolist(), strict=True))
        assert row(built, token) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("option", "value"), [("num_neighbors", 0), ("temperature", 0), ("temperature", float("nan"))])
def test_options_without_meaning_are_refused(tokenizer_of, options_of, option, value):
    options = {**options_of("embedding", "student", "teacher"), option: value}
    with pytest.raises(XtkError, match=f"--{option.replace('_', '-')}"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "embedding", **options)


def test_an_embedding_smaller_than_its_vocabulary_is_refused(tokenizer_of, options_of):
    options = options_of("embedding", "student", "teacher")
    with pytest.raises(XtkError, match="the model's embedding has 5 rows"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "embedding",
                         **{**options, "student_embedding": options["student_embedding"][:5]})  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_an_embedding_with_numbers_that_are_none_is_refused(tokenizer_of, options_of, side, value):
    options = options_of("embedding", "student", "teacher")
    broken = options[f"{side}_embedding"].copy()
    broken[7, 3] = value
    with pytest.raises(XtkError, match="contains NaN or infinite values"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "embedding",
                         **{**options, f"{side}_embedding": broken})  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_embedding_of_a_folder_is_the_model_s(tmp_path, dtype):
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    matrix = torch.randn(7, 5).to(kind)
    tensors = {"model.embed_tokens.weight": matrix, "model.norm.weight": torch.ones(5), "lm_head.weight": -matrix}
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_input_embedding(tmp_path)
    assert found.dtype == np.float32
    assert found.tolist() == matrix.float().numpy().tolist()


def test_folders_without_an_embedding_are_refused_by_name(tmp_path):
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
