"""Losses, gradients and weights do not depend on the number of processes and of forward passes per step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_inputs
import torch
from safetensors.torch import load_file

from xtk.losses.spec import parse_losses
from xtk.runs.metrics_file import read_metrics

pytestmark = pytest.mark.slow

LOSSES = "ce:weight=0.5 p-kl boundary-kl:weight=0.25 byte-kl:weight=2 alm uld:weight=0.5 gold h-kl:weight=0.25"
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            "--nproc-per-node", "2"]  # fmt: skip
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
HELPERS = str(Path(small_inputs.__file__).parent)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ACCELERATE_USE_CPU": "true"}


def run_python(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([HELPERS, os.environ.get("PYTHONPATH", "")])},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


# --- loss and gradient

# DOCUMENTS:BATCH: eight documents in one, two and four passes, five in one and three; then the same over two processes.
# In the last case the second process has no documents.
ONE_PROCESS = ["8:8", "8:4", "8:2", "5:5", "5:2"]
TWO_PROCESSES = ["8:4", "8:2", "8:3", "5:3", "5:2", "5:5"]


# Several teachers, and documents with different weights.
COMBINED = {
    "sum": {"options": {"teacher_weights": "0.7,0.3"}},
    "by batch": {
        "options": {"teacher_weights": "ce:alpha=3,per=batch", "scale_kd_to": "ce"},
        "losses": ["ce", "byte-kl"],
    },
    "by span": {"options": {"teacher_weights": "max-probability:alpha=4,per=span"}},
    "select": {"options": {"combine_teachers": "select"}},
    "route": {"options": {"combine_teachers": "route", "scale_kd_to": "ce"}, "losses": ["auto", "ce:weight=0.5"]},
}
COMBINED_WAYS = {1: ["5:5", "5:2"], 2: ["5:3", "5:2"]}


@dataclass(frozen=True)
class DumpedSteps:
    folder: Path
    results: dict[str, Any]

    def gradient(self, way: str, case: str = "one teacher") -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{case}-{way.replace(':', '-')}.safetensors")


@pytest.fixture(scope="module")
def cache(run, pair, corpus, tmp_path_factory) -> Path:
    """The session's cache in float32: from quantized log-probabilities, a weight once differed by 1.3e-5."""
    folder = tmp_path_factory.mktemp("exact") / "cache"
    exact = ("--top-k", 16, "--shard-tokens", 400, "--precision", "float32")
    run("cache-teacher", pair.teacher, corpus, *exact, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def weighted(run, pair, tmp_path_factory) -> list[str]:
    """Caches of two teachers, one of them with the student's tokenizer, whose documents have weights and routes."""
    folder = tmp_path_factory.mktemp("weighted")
    other = small_inputs.make_student(folder / "other", seed=7)
    lines = [
        {"text": text, "quality": (0.5, 1, 2, 3)[at % 4], "by": (pair.teacher.name, "other")[at % 3 == 0]}
        for at, text in enumerate(small_inputs.sentences(10, seed=8))
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = ("--weight-column", "quality", "--route-column", "by")
    for number, teacher in enumerate((pair.teacher, other)):
        run("cache-teacher", teacher, "data.jsonl", "--top-k", 16, "--precision", "float32", *columns,
            "-o", f"cache-{number}", cwd=folder)  # fmt: skip
    return [str(folder / "cache-0"), str(folder / "cache-1")]


@pytest.fixture(scope="module")
def dumped(pair, cache, projection, weighted, tmp_path_factory) -> dict[int, DumpedSteps]:
    """The results of one and of two processes, by the number of processes."""
    script = Path(__file__).parent / "gradient_dump_process.py"
    results = {}
    for processes, launcher, ways in ((1, [], ONE_PROCESS), (2, TORCHRUN, TWO_PROCESSES)):
        folder = tmp_path_factory.mktemp(f"gradients-{processes}")
        one = {"name": "one teacher", "caches": [str(cache)], "projections": [str(projection)], "options": {}}
        several = {"losses": ["auto"], "caches": weighted, "projections": [], "ways": COMBINED_WAYS[processes]}
        cases = [
            {**one, "losses": LOSSES.split(" "), "ways": ways},
            *({**several, **case, "name": name} for name, case in COMBINED.items()),
        ]
        request = {"student": str(pair.student), "output": str(folder), "cases": cases}
        run_python(*launcher, script, json.dumps(request), cwd=folder)
        results[processes] = DumpedSteps(folder, json.loads((folder / "results.json").read_text()))
    return results


def test_each_way_to_split_a_step_has_its_number_of_processes_and_passes(dumped):
    one, two = (list(dumped[processes].results["one teacher"].values()) for processes in (1, 2))
    assert {result["processes"] for result in one} == {1}
    assert {result["processes"] for result in two} == {2}
    assert [result["passes"] for result in one] == [1, 2, 4, 1, 3]
    assert [result["passes"] for result in two] == [1, 2, 2, 1, 2, 1]
    # Over two steps: 8 documents in threes leave the second process without a fourth batch.
    assert [result["empty"] for result in two] == [0, 0, 2, 0, 2, 2]


@pytest.mark.parametrize(("processes", "way"), [(1, way) for way in ONE_PROCESS] + [(2, way) for way in TWO_PROCESSES])
def test_gradients_equal_those_of_one_process_with_one_pass(dumped, processes, way):
    assert_same_steps(dumped, "one teacher", processes, way)


@pytest.mark.parametrize("case", list(COMBINED))
@pytest.mark.parametrize(("processes", "way"), [(1, "5:2"), (2, "5:3"), (2, "5:2")])
def test_gradients_of_several_teachers_equal_those_of_one_process(dumped, processes, way, case):
    assert_same_steps(dumped, case, processes, way)


def assert_same_steps(dumped: dict[int, DumpedSteps], case: str, processes: int, way: str) -> None:
    documents = way.split(":")[0]
    one_pass = f"{documents}:{documents}"
    expected, found = dumped[1].gradient(one_pass, case), dumped[processes].gradient(way, case)
    found_results, expected_results = dumped[processes].results[case][way], dumped[1].results[case][one_pass]
    assert expected.keys() == found.keys()
    for name in expected:
        scale = float(expected[name].abs().max())
        assert scale > 0
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=2e-6 * scale)
    for one, other in zip(found_results["losses"], expected_results["losses"], strict=True):
        assert one == pytest.approx(other, rel=2e-6)
    assert found_results["norms"] == pytest.approx(expected_results["norms"], rel=1e-5)


def test_the_total_is_the_weighted_sum_of_the_terms(dumped):
    for losses in dumped[2].results["one teacher"]["8:4"]["losses"]:
        expected = sum(loss.weight * losses[loss.name] for loss in parse_losses(LOSSES.split()))
        assert losses["loss"] == pytest.approx(expected, rel=1e-12)


# --- weights of `xtk distill`

STEPS = 5


@dataclass(frozen=True)
class Trained:
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, Any]]
    stdout: str
    stderr: str
    folder: Path


@pytest.fixture(scope="module")
def trained(pair, cache, projection, tmp_path_factory):
    """Return a function that runs `xtk distill` for five steps with a launcher and options, once per name."""
    runs: dict[str, Trained] = {}

    def train(name: str, launcher: list[str], *options: object) -> Trained:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name)
            result = run_python(
                *launcher, "-m", "xtk", "distill", pair.student, cache, "--projection", projection, "-o", "out",
                "--max-steps", STEPS, "--logging-steps", 1, "--learning-rate", 1e-3, *options, cwd=folder,
            )  # fmt: skip
            out = folder / "out"
            runs[name] = Trained(
                load_file(out / "model.safetensors"),
                read_metrics(out / "metrics.jsonl"),
                result.stdout,
                result.stderr,
                out,
            )
        return runs[name]

    return train


def batch_options(documents: int, passes: int = 1) -> list[object]:
    return ["--per-device-train-batch-size", documents, "--gradient-accumulation-steps", passes]


def assert_same_run(found: Trained, expected: Trained, processes: int, parallelism: str = "data parallel") -> None:
    expected_processes = "1 process" if processes == 1 else f"{processes} processes: {processes}-way {parallelism}"
    assert f"{STEPS} steps of 8 documents, 40 documents, {expected_processes} on cpu" in found.stderr
    assert found.stdout == "out\n"
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        for key in ("step", "loss", "ce", "p-kl", "learning_rate", "gradient_norm", "tokens", "unaligned_fraction"):
            assert one[key] == pytest.approx(other[key], rel=1e-5), key
    for name, weight in expected.weights.items():
        assert float((found.weights[name] - weight).abs().max()) <= 1e-5 * float(weight.abs().max()), name


@pytest.mark.long
def test_the_weights_do_not_depend_on_the_number_of_processes(trained):
    one = trained("one", [], *batch_options(8))
    two = trained("two", [], *batch_options(4), "--num-processes", 2)
    assert_same_run(two, one, processes=2)
    assert one.metrics[-1]["loss"] < one.metrics[0]["loss"]


@pytest.mark.long
@pytest.mark.parametrize("passes", [2, 4])
def test_the_weights_do_not_depend_on_gradient_accumulation(trained, passes):
    one = trained("one", [], *batch_options(8))
    assert_same_run(trained(f"passes-{passes}", [], *batch_options(8 // passes, passes)), one, processes=1)


@pytest.mark.long
def test_the_weights_do_not_depend_on_processes_and_accumulation_together(trained):
    one = trained("one", [], *batch_options(8))
    both = trained("both", [], *batch_options(2, 2), "--num-processes", 2)
    assert_same_run(both, one, processes=2)


@pytest.mark.long
@pytest.mark.parametrize(("name", "documents", "parallelism"), [("cp", 8, "context parallel"), ("fsdp", 4, "FSDP")])
def test_the_weights_do_not_depend_on_context_parallel_or_fsdp(trained, name, documents, parallelism):
    one = trained("one", [], *batch_options(8))
    two = trained(name, [], *batch_options(documents), "--num-processes", 2, "--parallel", f"{name}=2")
    assert_same_run(two, one, processes=2, parallelism=parallelism)


@pytest.mark.long
def test_torchrun_starts_the_same_run(trained):
    one = trained("one", [], *batch_options(8))
    assert_same_run(trained("torchrun", TORCHRUN, *batch_options(4)), one, processes=2)


@pytest.mark.long
def test_accelerate_launch_starts_the_same_run(trained):
    one = trained("one", [], *batch_options(8))
    assert_same_run(trained("accelerate", ACCELERATE, *batch_options(4)), one, processes=2)
