"""A pretrained student and a teacher that knows nothing: `distill` reports it; the other way round it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_inputs
from installed_smollm2 import find_smollm2

from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.runs.metrics_file import read_metrics

NOTE = "distill: warning: the teacher"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    texts = [text[:150] for text in train_test_split(python_documents())[0] if text.isascii()][:4]
    return small_inputs.write_jsonl(tmp_path_factory.mktemp("texts") / "data.jsonl", texts)


@pytest.mark.parametrize("is_student", [True, False], ids=["student", "teacher"])
def test_untrained_teacher_of_a_pretrained_student_is_reported(run, pair, data, tmp_path, is_student):
    """Measured on the first 150 characters of 4 pages: SmolLM2 1.70 bits per byte, the untrained Qwen3 7.91."""
    pretrained, toy = str(find_smollm2()), pair.teacher
    student, teacher = (pretrained, toy) if is_student else (toy, pretrained)
    made = run("cache-teacher", teacher, data, "-o", tmp_path / "cache")
    assert "cache-teacher: the teacher has " in made.stderr
    trained = run("distill", student, tmp_path / "cache", "--max-steps", 1, "--per-device-train-batch-size", 4,
                  "--save-steps", 0, "-o", tmp_path / "out")  # fmt: skip
    assert trained.stderr.count(NOTE) == int(is_student)
    first = read_metrics(tmp_path / "out" / "metrics.jsonl")[0]
    levels = [first["student_bits_per_byte"], first["teacher_bits_per_byte"]]
    of_pretrained, of_toy = levels if is_student else levels[::-1]
    assert of_pretrained < 2
    assert of_toy > 3
