"""Generation servers with other weights than the student's: restarted ones, and ones that keep a part of the old."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import small_inputs
from http_server_processes import Served, generate_as_vllm, served
from xtk_processes import run_xtk

from xtk.engines import http_client_pool
from xtk.engines.backend import BackendConfig
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import XtkError
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.server_generator import ServerGenerator
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.metrics_file import read_metrics

pytestmark = pytest.mark.slow

PATIENT = RetryPolicy(
    max_attempts=200, total_seconds=60, attempt_seconds=30, connect_seconds=5, initial_backoff=0.05, max_backoff=0.2
)
GREEDY = SamplingConfig(temperature=0, max_completion_length=6)
RESTARTED = "was restarted without the student's weights; sent them again"


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> tuple[Path, Path]:
    """A student before a step and after it; tied embeddings."""
    root = tmp_path_factory.mktemp("students")
    return small_inputs.make_teacher(root / "old", seed=1), small_inputs.make_teacher(root / "new", seed=5)


def asks() -> list[GenerationRequest]:
    draw = np.random.default_rng(3)
    return [GenerationRequest(draw.integers(5, 400, 12).astype(np.int32), (1, at)) for at in range(8)]


def greedily(folder: Path) -> list[list[int]]:
    request = BackendConfig(folder, "student", Tokenizer(folder))
    return ids_of(TransformersGenerator.open(request).generate(asks(), GREEDY))


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [one.ids.tolist() for one in completions]


def writer_of(folder: Path, *servers: Served) -> ServerGenerator:
    options = {"servers": [one.url for one in servers], "patience": PATIENT, "concurrency": 4}
    return ServerGenerator.open(BackendConfig(folder, "student", Tokenizer(folder), options=options))


def with_its_head(student: Path, folder: Path) -> Path:
    """The weights as a run hands them to servers."""
    from safetensors.torch import load_file

    from xtk.rollouts.engine_weight_files import save_weights

    folder.mkdir()
    save_weights(load_file(student / "model.safetensors").items(), folder)
    return folder


@pytest.mark.parametrize("dies_at", [None, 5], ids=["between two requests", "within a rollout batch"])
def test_a_restarted_server_gets_the_weights_again(students, tmp_path, capsys, monkeypatch, dies_at):
    monkeypatch.setattr(http_client_pool, "REPORT_INTERVAL_SECONDS", 0.5)
    old, new = students
    first = Served(generate_as_vllm, str(old), {"dies_at": dies_at})
    port = urlsplit(first.url).port
    writer = writer_of(old, first)
    writer.update_weights(with_its_head(new, tmp_path / "weights"))
    expected = greedily(new)
    assert expected != greedily(old)
    second: list[Served] = []

    def come_back() -> None:
        first.process.join()
        time.sleep(1.5)
        second.append(Served(generate_as_vllm, str(old), {"port": port, "seconds": 0.05}))

    fate = threading.Thread(target=come_back)
    fate.start()
    try:
        if dies_at is None:
            first.kill()
            fate.join()
        assert ids_of(writer.generate(asks(), GREEDY)) == expected
        assert ids_of(writer.generate(asks(), GREEDY)) == expected
        told = capsys.readouterr().err
        assert told.count(RESTARTED) == 1, told
        if dies_at is not None:
            assert "; retrying" in told
            assert f"{first.url}: no response for " in told, "a line every so many seconds"
            assert "responding again after" in told
    finally:
        first.kill()
        fate.join()
        for one in second:
            one.kill()


def test_a_server_that_knows_no_version_of_its_weights_is_refused(students, tmp_path):
    with served(generate_as_vllm, str(students[0]), {"unversioned": True}) as server:
        with pytest.raises(XtkError, match="does not accept weight updates: HTTP 404") as refused:
            writer_of(students[0], server).update_weights(with_its_head(students[1], tmp_path / "weights"))
        assert "VLLM_SERVER_DEV_MODE=1" in str(refused.value.hint)


def test_weights_without_the_output_head_of_a_tied_student_are_refused(students):
    with (
        served(generate_as_vllm, str(students[0]), {}) as server,
        pytest.raises(XtkError, match=r"missing: lm_head\.weight"),
    ):
        writer_of(students[0], server).update_weights(students[1])


def train(student: Path, teacher: Path, tmp_path: Path, server: Served, code: int) -> str:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Anna has {n} apples and"}) + "\n" for n in range(6)))
    done = run_xtk("distill", student, data, "--on-policy", "--teacher", f"{teacher}:top_k=16",
                   "--rollout-backend", "server", "--rollout-server", server.url, "--temperature", 1,
                   "--loss", "reverse-kl", "--loss", "policy-gradient", "--per-device-train-batch-size", 3,
                   "--max-completion-length", 8, "--max-steps", 3, "--learning-rate", "1e-2", "--warmup-steps", 0,
                   "--lr-scheduler-type", "constant", "--logging-steps", 1,
                   "-o", tmp_path / "out", code=code)  # fmt: skip
    return done.stderr


def test_every_rollout_batch_of_a_tied_student_is_compared_with_the_student(pair, students, tmp_path):
    with served(generate_as_vllm, str(students[0]), {}) as server:
        train(students[0], pair.teacher, tmp_path, server, 0)
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert len(metrics) == 3
    for record in metrics:
        assert record["rollout_logprob_difference"] < 1e-4
        assert abs(record["importance_ratio"] - 1) < 1e-3
    assert not list((tmp_path / "out").glob(".*weights*"))


@pytest.mark.parametrize("broken", [{"keeps_head": True}, {"shift": -0.3}], ids=["old output head", "wrong numbers"])
def test_an_engine_with_other_weights_is_refused_before_a_step_is_taken_on_its_rollouts(
    pair, students, tmp_path, broken
):
    with served(generate_as_vllm, str(students[0]), broken) as server:
        told = train(students[0], pair.teacher, tmp_path, server, 1)
        assert "the engine's log-probabilities differ from the student's by" in told
        assert "nats per token on average, more than 0." in told
        assert "Traceback" not in told
    steps = [record["step"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert steps == ([1] if broken.get("keeps_head") else [])
    with served(generate_as_vllm, str(students[0]), {}) as server:
        train(students[0], pair.teacher, tmp_path, server, 0)
