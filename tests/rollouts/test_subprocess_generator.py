"""A writer in a process of its own writes as one in this process does, and its end is told."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from xtk.engines.backend import BackendConfig
from xtk.engines.worker_process import WorkerError
from xtk.errors import MismatchError, XtkError
from xtk.models.causal_lm import load_causal_lm
from xtk.rollouts.engine_weight_files import WeightNames, save_weights
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.subprocess_generator import SHARED_MEMORY, WEIGHTS_FOLDER_PREFIX, SubprocessGenerator
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.tokens.tokenizer import Tokenizer

ASKS = [
    GenerationRequest(np.arange(5, 12 + at, dtype=np.int32), (3, at), None if at % 2 else 4 + at) for at in range(5)
]
SAMPLING = SamplingConfig(
    temperature=0.9, top_p=0.95, top_k=50, max_completion_length=9, stop=("a", "é"), top_logprobs=2
)


def request_of(folder: Path) -> BackendConfig:
    return BackendConfig(folder, "student", Tokenizer(folder))


def assert_alike(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.top_ids is None) == (other.top_ids is None)
        assert one.top_ids is None or one.top_ids.tolist() == other.top_ids.tolist()


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_apart_it_writes_what_it_writes_here_and_takes_new_weights_and_its_end_is_told(pair, tmp_path):
    request = request_of(pair.student)
    here = TransformersGenerator.open(request)
    left = SHARED_MEMORY / f"{WEIGHTS_FOLDER_PREFIX}999999999-left"
    if SHARED_MEMORY.is_dir():
        left.mkdir(exist_ok=True)
    with SubprocessGenerator(request, "transformers") as apart:
        assert not left.exists(), "of a process that is no more"
        assert apart.context_length == here.context_length
        assert apart.generate([], SAMPLING) == []
        assert_alike(apart.generate(ASKS, SAMPLING), here.generate(ASKS, SAMPLING))
        with pytest.raises(XtkError, match="leaves no space") as refused:
            apart.generate([GenerationRequest(np.ones(apart.context_length, np.int32), (1,))], SAMPLING)
        assert refused.value.where is not None
        new = copy.deepcopy(here.model)
        with torch.no_grad():
            new.lm_head.weight.mul_(-3)
        new.save_pretrained(tmp_path)
        for old, weights in ((here.model, new.state_dict().items()), (new, pair.student), (here.model, tmp_path)):
            before = apart.generate(ASKS, SAMPLING)
            assert_alike(before, TransformersGenerator(old, request.tokenizer).generate(ASKS, SAMPLING))
            apart.update_weights(weights)
        assert_alike(
            apart.generate(ASKS, SAMPLING), TransformersGenerator(new, request.tokenizer).generate(ASKS, SAMPLING)
        )
        apart.sleep()
        apart.wake_up()
        apart.process.send_signal(signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(XtkError, match="killed by SIGKILL"):
                apart.generate(ASKS, SAMPLING)
    if SHARED_MEMORY.is_dir():
        assert not list(SHARED_MEMORY.glob(f"{WEIGHTS_FOLDER_PREFIX}{os.getpid()}-*"))


def test_a_model_that_cannot_be_opened_is_told_as_here(pair, tmp_path):
    request = BackendConfig(tmp_path, "student", Tokenizer(pair.student))
    with pytest.raises(XtkError) as here:
        TransformersGenerator.open(request)
    with pytest.raises(XtkError) as apart:
        SubprocessGenerator(request, "transformers")
    assert str(apart.value) == str(here.value)
    with pytest.raises(XtkError, match="did you mean vllm"):
        SubprocessGenerator(request, "vlm")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_it_ends_with_its_parent_that_is_killed(pair):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from xtk.rollouts.subprocess_generator import SubprocessGenerator\n"
        "from xtk.engines.backend import BackendConfig; from xtk.tokens.tokenizer import Tokenizer\n"
        "folder = Path(sys.argv[1])\n"
        "apart = SubprocessGenerator(BackendConfig(folder, 'student', Tokenizer(folder)), 'transformers')\n"
        "sys.stderr.write(f'{apart.process.pid}\\n'); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(pair.student)], stderr=subprocess.PIPE, text=True)
    child = 0
    for line in parent.stderr:
        if line.strip().isdecimal():
            child = int(line)
            break
    assert runs(child)
    parent.kill()
    parent.wait()
    parent.stderr.close()
    end = time.monotonic() + 30
    while runs(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(child)


def test_messages_hold_what_they_were_given_and_nothing_that_is_run():
    ours, theirs = Pipe()
    ours.send(ASKS)
    found = theirs.recv()
    assert [(one.input_ids.tolist(), one.seed_key, one.max_length) for one in found] == [
        (one.input_ids.tolist(), one.seed_key, one.max_length) for one in ASKS
    ]
    wrong = MismatchError("two things", where="here", hint="there")
    ours.send(WorkerError.from_exception(wrong, "the generation process"))
    told = theirs.recv()
    again = told.to_exception()
    assert (type(again), str(again)) == (MismatchError, str(wrong))
    assert type(replace(told, kind="os").to_exception()) is XtkError


def test_weights_without_one_or_of_another_model_are_refused(pair, tmp_path):
    state = load_causal_lm(pair.student).state_dict()
    names = WeightNames.from_folder(pair.student)
    save_weights(state.items(), tmp_path)
    names.check_complete(WeightNames.from_folder(tmp_path), "there")
    for told in (names.names - {"model.norm.weight"}, names.names | {"model.layers.9.q.weight"}):
        with pytest.raises(MismatchError, match="do not match the model"):
            names.check_complete(WeightNames(frozenset(told)), "there")
    second = shutil.copytree(pair.student, tmp_path / "second")  # as Mistral publishes models
    state = {f"other.{name}": weight for name, weight in load_file(second / "model.safetensors").items()}
    save_file(state, second / "consolidated.safetensors")
    assert WeightNames.from_folder(second) == names
    with pytest.raises(MismatchError):
        names.check_complete(WeightNames(names.names - {"lm_head.weight"}), "there")
    tied = WeightNames(names.names - {"lm_head.weight"})
    tied.check_complete(names, "there")
    with pytest.raises(MismatchError, match=r"missing: lm_head\.weight"):  # an engine would keep its old one
        tied.check_complete(tied, "there")


def test_tied_weights_are_saved_twice(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    save_weights([("one", weight), ("other", weight), ("part", weight[:, 1]), ("turned", weight.T)], tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found["one"].tolist() == found["other"].tolist() == weight.tolist()
    assert found["part"].tolist() == [1, 4]
    assert found["turned"].tolist() == weight.T.tolist()
