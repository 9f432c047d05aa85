"""Nearest neighbors of embeddings, and reading embeddings from model folders."""

from __future__ import annotations

import numpy as np
import pytest

from xtk.errors import CorruptError, XtkError
from xtk.models.safetensors_headers import read_input_embedding
from xtk.projection.build import build_projection


def row_of(projection, token):
    span = slice(projection.row_offsets[token], projection.row_offsets[token + 1])
    return dict(zip(projection.teacher_ids[span].tolist(), projection.weights[span].tolist(), strict=True))


def normalized(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_rotated_and_shifted_copies_of_embeddings_are_matched(tokenizer_of):
    student_tokenizer, teacher_tokenizer = tokenizer_of["student"], tokenizer_of["teacher"]
    rng = np.random.default_rng(0)
    student = rng.normal(size=(student_tokenizer.embedding_rows, 24)).astype(np.float32)
    teacher = rng.normal(size=(teacher_tokenizer.embedding_rows, 24)).astype(np.float32)
    rotation = np.linalg.qr(rng.normal(size=(24, 24)))[0]
    targets: dict[int, int] = {}
    unmatched = iter([token for token, spelling in enumerate(teacher_tokenizer.vocabulary.bytes_by_id)
                      if spelling and spelling not in student_tokenizer.vocabulary.token_of_bytes])  # fmt: skip
    for token, spelling in enumerate(student_tokenizer.vocabulary.bytes_by_id):
        if spelling:
            target = teacher_tokenizer.vocabulary.token_of_bytes.get(spelling)
            target = next(unmatched, None) if target is None else target
            if target is not None:
                targets[token] = target
                teacher[target] = student[token] @ rotation + 3
    built = build_projection(student_tokenizer, teacher_tokenizer, "embedding", student_embedding=student,
                             teacher_embedding=teacher, num_neighbors=2, temperature=0.01)  # fmt: skip
    built.validate()
    assert len(targets) > 300
    assert all(row_of(built, token).get(target, 0) > 0.9 for token, target in targets.items())


def test_weights_agree_with_dense_cosine_similarities(tokenizer_of, method_options):
    student_tokenizer, teacher_tokenizer = tokenizer_of["student"], tokenizer_of["metaspace"]
    options = method_options("embedding", "student", "metaspace")
    built = build_projection(
        student_tokenizer, teacher_tokenizer, "embedding", num_neighbors=3, temperature=0.2, **options
    )
    student_embedding, teacher_embedding = (
        options["student_embedding"].astype(float),
        options["teacher_embedding"].astype(float),
    )
    teacher_token_of_bytes = teacher_tokenizer.vocabulary.token_of_bytes
    pairs = [
        (token, teacher_token_of_bytes[text])
        for token, text in enumerate(student_tokenizer.vocabulary.bytes_by_id)
        if text in teacher_token_of_bytes
    ]
    rows, columns = map(list, zip(*pairs, strict=True))
    student_embedding, teacher_embedding = (
        student_embedding - student_embedding[rows].mean(0),
        teacher_embedding - teacher_embedding[columns].mean(0),
    )
    u, _, v = np.linalg.svd(
        normalized(student_embedding[rows]).T @ normalized(teacher_embedding[columns]), full_matrices=False
    )
    cosines = normalized(student_embedding @ u @ v) @ normalized(teacher_embedding).T
    cosines[:, teacher_tokenizer.vocabulary.byte_lengths == 0] = -np.inf
    for token in set(np.flatnonzero(student_tokenizer.vocabulary.byte_lengths).tolist()) - set(rows):
        nearest = np.argsort(-cosines[token])[:3]
        weights = np.exp(cosines[token][nearest] / 0.2)
        expected = dict(zip(nearest.tolist(), (weights / weights.sum()).tolist(), strict=True))
        assert row_of(built, token) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("option", "value"), [("num_neighbors", 0), ("temperature", 0), ("temperature", float("nan"))])
def test_invalid_options_are_refused(tokenizer_of, method_options, option, value):
    options = {**method_options("embedding", "student", "teacher"), option: value}
    with pytest.raises(XtkError, match=f"--{option.replace('_', '-')}"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "embedding", **options)


def test_embedding_smaller_than_its_vocabulary_is_refused(tokenizer_of, method_options):
    options = method_options("embedding", "student", "teacher")
    with pytest.raises(XtkError, match="the model's embedding has 5 rows"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "embedding",
                         **{**options, "student_embedding": options["student_embedding"][:5]})  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_embedding_with_nan_or_infinite_values_is_refused(tokenizer_of, method_options, side, value):
    options = method_options("embedding", "student", "teacher")
    broken = options[f"{side}_embedding"].copy()
    broken[7, 3] = value
    with pytest.raises(XtkError, match="contains NaN or infinite values"):
        build_projection(tokenizer_of["student"], tokenizer_of["teacher"], "embedding",
                         **{**options, f"{side}_embedding": broken})  # fmt: skip


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
