"""Generation servers whose weights are not the student's: restarted servers, and servers that keep old weights."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import small_inputs
from http_server_processes import ServerProcess, run_server, serve_generation_as_vllm
from xtk_processes import run_xtk

from xtk.engines import http_client_pool
from xtk.engines.backend import BackendConfig
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import XtkError
from xtk.models.resolver import ModelRef
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.server_generator import ServerGenerator
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.runs.metrics_file import read_metrics
from xtk.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PATIENT_POLICY = RetryPolicy(
    max_attempts=200, total_seconds=60, attempt_seconds=30, connect_seconds=5, initial_backoff=0.05, max_backoff=0.2
)
GREEDY = SamplingConfig(temperature=0, max_completion_length=6)
RESTARTED_MESSAGE = "was restarted without the student's weights; sent them again"


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> tuple[Path, Path]:
    """Return a student before a step and after it, with tied embeddings."""
    root = tmp_path_factory.mktemp("students")
    return small_inputs.make_teacher(root / "old", seed=1), small_inputs.make_teacher(root / "new", seed=5)


def generation_requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(3)
    return [GenerationRequest(rng.integers(5, 400, 12).astype(np.int32), (1, index)) for index in range(8)]


def greedy_ids(folder: Path) -> list[list[int]]:
    config = BackendConfig(ModelRef(folder, name="student"), Tokenizer(folder))
    return ids_of(TransformersGenerator.open(config).generate(generation_requests(), GREEDY))


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [one.ids.tolist() for one in completions]


def make_generator(folder: Path, *servers: ServerProcess) -> ServerGenerator:
    options = {"servers": [one.url for one in servers], "patience": PATIENT_POLICY, "concurrency": 4}
    return ServerGenerator.open(BackendConfig(ModelRef(folder, name="student"), Tokenizer(folder), options=options))


def write_engine_weights(student: Path, folder: Path) -> Path:
    """Write the weights of a student as a run sends them to servers, with the output head; return their folder."""
    from xtk.rollouts.engine_weight_files import write_tied_head

    shutil.copytree(student, folder)
    write_tied_head(folder)
    return folder


@pytest.mark.parametrize("dies_at", [None, 5], ids=["between two requests", "within a rollout batch"])
def test_restarted_server_receives_the_weights_again(students, tmp_path, capsys, monkeypatch, dies_at):
    monkeypatch.setattr(http_client_pool, "REPORT_INTERVAL_SECONDS", 0.5)
    old, new = students
    first_server = ServerProcess(serve_generation_as_vllm, str(old), {"dies_at": dies_at})
    port = urlsplit(first_server.url).port
    generator = make_generator(old, first_server)
    generator.update_weights(write_engine_weights(new, tmp_path / "weights"))
    expected = greedy_ids(new)
    assert expected != greedy_ids(old)
    restarted: list[ServerProcess] = []

    def restart_server() -> None:
        first_server.process.join()
        time.sleep(1.5)
        restarted.append(ServerProcess(serve_generation_as_vllm, str(old), {"port": port, "seconds": 0.05}))

    restart_thread = threading.Thread(target=restart_server)
    restart_thread.start()
    try:
        if dies_at is None:
            first_server.kill()
            restart_thread.join()
        assert ids_of(generator.generate(generation_requests(), GREEDY)) == expected
        assert ids_of(generator.generate(generation_requests(), GREEDY)) == expected
        stderr = capsys.readouterr().err
        assert stderr.count(RESTARTED_MESSAGE) == 1, stderr
        if dies_at is not None:
            assert "; retrying" in stderr
            assert f"{first_server.url}: no response for " in stderr, "a line every few seconds"
            assert "responding again after" in stderr
    finally:
        first_server.kill()
        restart_thread.join()
        for server in restarted:
            server.kill()


def test_server_without_a_weight_version_is_refused(students, tmp_path):
    with run_server(serve_generation_as_vllm, str(students[0]), {"unversioned": True}) as server:
        with pytest.raises(XtkError, match="does not accept weight updates: HTTP 404") as raised:
            make_generator(students[0], server).update_weights(write_engine_weights(students[1], tmp_path / "weights"))
        assert "VLLM_SERVER_DEV_MODE=1" in str(raised.value.hint)


def test_weights_without_the_output_head_of_a_tied_student_are_refused(students):
    with (
        run_server(serve_generation_as_vllm, str(students[0]), {}) as server,
        pytest.raises(XtkError, match=r"missing: lm_head\.weight"),
    ):
        make_generator(students[0], server).update_weights(students[1])


def train(student: Path, teacher: Path, tmp_path: Path, server: ServerProcess, code: int) -> str:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Anna has {n} apples and"}) + "\n" for n in range(6)))
    result = run_xtk("distill-on-policy", student, data, "--teacher", f"{teacher}:top_k=16",
                     "--rollout-backend", "server", "--rollout-server", server.url, "--temperature", 1,
                     "--loss", "reverse-kl", "--loss", "policy-gradient", "--per-device-train-batch-size", 3,
                     "--max-completion-length", 8, "--max-steps", 3, "--learning-rate", "1e-2", "--warmup-steps", 0,
                     "--lr-scheduler-type", "constant", "--logging-steps", 1,
                     "-o", tmp_path / "out", code=code)  # fmt: skip
    return result.stderr


def test_rollout_batches_of_a_tied_student_match_its_log_probabilities(pair, students, tmp_path):
    with run_server(serve_generation_as_vllm, str(students[0]), {}) as server:
        train(students[0], pair.teacher, tmp_path, server, 0)
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert len(metrics) == 3
    for record in metrics:
        assert record["rollout_logprob_difference"] < 1e-4
        assert abs(record["importance_ratio"] - 1) < 1e-3
    assert not list((tmp_path / "out").glob(".*weights*"))


@pytest.mark.parametrize("broken", [{"keeps_head": True}, {"shift": -0.3}], ids=["old output head", "wrong numbers"])
def test_engine_with_other_weights_is_refused_before_training_on_its_rollouts(pair, students, tmp_path, broken):
    with run_server(serve_generation_as_vllm, str(students[0]), broken) as server:
        stderr = train(students[0], pair.teacher, tmp_path, server, 1)
        assert "the engine's log-probabilities differ from the student's by" in stderr
        assert "nats per token on average, more than 0." in stderr
        assert "Traceback" not in stderr
    steps = [record["step"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert steps == ([1] if broken.get("keeps_head") else [])
    with run_server(serve_generation_as_vllm, str(students[0]), {}) as server:
        train(students[0], pair.teacher, tmp_path, server, 0)
