"""Subprocess generator: same completions as the in-process generator, weight updates, and errors."""

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
from xtk.models.resolver import ModelRef
from xtk.rollouts.engine_weight_files import WeightNames, write_tied_head
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.subprocess_generator import SHARED_MEMORY, WEIGHTS_FOLDER_PREFIX, SubprocessGenerator
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.text.tokenizer import Tokenizer

REQUESTS = [GenerationRequest(np.arange(5, 12 + i, dtype=np.int32), (3, i), None if i % 2 else 4 + i) for i in range(5)]
SAMPLING = SamplingConfig(
    temperature=0.9, top_p=0.95, top_k=50, max_completion_length=9, stop=("a", "é"), top_logprobs=2
)


def backend_config(folder: Path) -> BackendConfig:
    return BackendConfig(ModelRef(folder, name="student"), Tokenizer(folder))


def assert_equal_completions(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.top_ids is None) == (other.top_ids is None)
        assert one.top_ids is None or one.top_ids.tolist() == other.top_ids.tolist()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_subprocess_generator_matches_in_process_generator_and_reports_its_death(pair, tmp_path):
    config = backend_config(pair.student)
    local_generator = TransformersGenerator.open(config)
    leftover = SHARED_MEMORY / f"{WEIGHTS_FOLDER_PREFIX}999999999-left"
    if SHARED_MEMORY.is_dir():
        leftover.mkdir(exist_ok=True)
    with SubprocessGenerator(config, "transformers") as generator:
        assert not leftover.exists(), "of a process that is no more"
        assert generator.context_length == local_generator.context_length
        assert generator.generate([], SAMPLING) == []
        assert_equal_completions(generator.generate(REQUESTS, SAMPLING), local_generator.generate(REQUESTS, SAMPLING))
        with pytest.raises(XtkError, match="leaves no space") as raised:
            generator.generate([GenerationRequest(np.ones(generator.context_length, np.int32), (1,))], SAMPLING)
        assert raised.value.where is not None
        new_model = copy.deepcopy(local_generator.model)
        with torch.no_grad():
            new_model.lm_head.weight.mul_(-3)
        new_model.save_pretrained(tmp_path)
        for current_model, weights in (
            (local_generator.model, tmp_path),
            (new_model, pair.student),
            (local_generator.model, tmp_path),
        ):
            before_update = generator.generate(REQUESTS, SAMPLING)
            assert_equal_completions(
                before_update, TransformersGenerator(current_model, config.tokenizer).generate(REQUESTS, SAMPLING)
            )
            generator.update_weights(weights)
        assert_equal_completions(
            generator.generate(REQUESTS, SAMPLING),
            TransformersGenerator(new_model, config.tokenizer).generate(REQUESTS, SAMPLING),
        )
        generator.sleep()
        generator.wake_up()
        generator.process.send_signal(signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(XtkError, match="killed by SIGKILL"):
                generator.generate(REQUESTS, SAMPLING)
    if SHARED_MEMORY.is_dir():
        assert not list(SHARED_MEMORY.glob(f"{WEIGHTS_FOLDER_PREFIX}{os.getpid()}-*"))


@pytest.mark.slow
def test_model_load_error_equals_that_of_the_in_process_generator(pair, tmp_path):
    config = BackendConfig(ModelRef(tmp_path, name="student"), Tokenizer(pair.student))
    with pytest.raises(XtkError) as local_error:
        TransformersGenerator.open(config)
    with pytest.raises(XtkError) as subprocess_error:
        SubprocessGenerator(config, "transformers")
    assert str(subprocess_error.value) == str(local_error.value)
    with pytest.raises(XtkError, match="did you mean vllm"):
        SubprocessGenerator(config, "vlm")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_subprocess_exits_when_its_parent_is_killed(pair):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from xtk.rollouts.subprocess_generator import SubprocessGenerator\n"
        "from xtk.engines.backend import BackendConfig; from xtk.text.tokenizer import Tokenizer\n"
        "from xtk.models.resolver import ModelRef\n"
        "folder = Path(sys.argv[1])\n"
        "apart = SubprocessGenerator(BackendConfig(ModelRef(folder), Tokenizer(folder)), 'transformers')\n"
        "sys.stderr.write(f'{apart.process.pid}\\n'); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(pair.student)], stderr=subprocess.PIPE, text=True)
    child = 0
    for line in parent.stderr:
        if line.strip().isdecimal():
            child = int(line)
            break
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stderr.close()
    end = time.monotonic() + 30
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(child)


def test_ipc_messages_preserve_requests_and_errors():
    sender, receiver = Pipe()
    sender.send(REQUESTS)
    received = receiver.recv()
    assert [(one.input_ids.tolist(), one.seed_key, one.max_length) for one in received] == [
        (one.input_ids.tolist(), one.seed_key, one.max_length) for one in REQUESTS
    ]
    error = MismatchError("two things", where="here", hint="there")
    sender.send(WorkerError.from_exception(error, "the generation process"))
    received_error = receiver.recv()
    restored = received_error.to_exception()
    assert (type(restored), str(restored)) == (MismatchError, str(error))
    assert type(replace(received_error, kind="os").to_exception()) is XtkError


def test_weights_with_missing_or_unknown_names_are_refused(pair, tmp_path):
    names = WeightNames.from_folder(pair.student)
    sent = shutil.copytree(pair.student, tmp_path / "sent")
    write_tied_head(sent)
    names.check_complete(WeightNames.from_folder(sent), "there")
    for wrong_names in (names.names - {"model.norm.weight"}, names.names | {"model.layers.9.q.weight"}):
        with pytest.raises(MismatchError, match="do not match the model"):
            names.check_complete(WeightNames(frozenset(wrong_names)), "there")
    second = shutil.copytree(pair.student, tmp_path / "second")  # like Mistral's models: a second file with other names
    state = {f"other.{name}": weight for name, weight in load_file(second / "model.safetensors").items()}
    save_file(state, second / "consolidated.safetensors")
    assert WeightNames.from_folder(second) == names
    with pytest.raises(MismatchError):
        names.check_complete(WeightNames(names.names - {"lm_head.weight"}), "there")
    tied_names = WeightNames(names.names - {"lm_head.weight"})
    tied_names.check_complete(names, "there")
    with pytest.raises(MismatchError, match=r"missing: lm_head\.weight"):  # an engine would keep its old output head
        tied_names.check_complete(tied_names, "there")
