"""vLLM in this process and in a subprocess: same completions as transformers, with the weights of the last update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from vllm_on_cpu import ENGINE, ENVIRONMENT

from xtk.errors import XtkError
from xtk.rollouts.generator_interface import Completion
from xtk.rollouts.subprocess_generator import SubprocessGenerator

from .generation_requests import (
    CONTEXT,
    GREEDY,
    SAMPLED,
    assert_equal_completions,
    backend_config,
    greedy_completions,
    make_requests,
    max_logprob_error,
)

SCRIPT = Path(__file__).parent / "vllm_generation_process.py"


@pytest.fixture(scope="module")
def outcome(students, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "results.json"
    command = [sys.executable, str(SCRIPT), *map(str, students), str(out), *ENGINE]
    process = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "", "stdout carries results only"
    return json.loads(out.read_text())


def completions(rows) -> list[Completion]:
    return [
        Completion(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            finish_reason,
            None if top_ids is None else np.array(top_ids),
        )
        for ids, logprobs, finish_reason, top_ids in rows
    ]


def test_logprobs_and_top_ids_equal_those_of_transformers(outcome, students):
    sampled = completions(outcome["sampled"])
    assert max_logprob_error(students[0], sampled) < 1e-4
    assert len({tuple(one.ids.tolist()) for one in sampled}) == len(sampled)
    assert outcome["sampled"][3][0] != outcome["sampled"][2][0][:11], "two completions of one prompt"
    assert len(outcome["sampled"][3][0]) <= 11


def test_completion_depends_on_its_key_and_not_on_its_position_in_the_batch(outcome):
    assert [one[0] for one in outcome["backwards"]] == [one[0] for one in outcome["sampled"]]


def test_greedy_completions_equal_those_of_transformers(outcome, students):
    expected = greedy_completions(students[0])
    assert {one.finish_reason for one in expected} >= {"stop-string", "length"}
    assert_equal_completions(completions(outcome["greedy"]), expected)


def test_weight_updates_take_effect_and_clear_the_prefix_cache(outcome, students):
    old, new = students
    assert max_logprob_error(new, completions(outcome["stale"])) > 0.1, (
        "the test would notice a prompt read with old weights"
    )
    assert max_logprob_error(new, completions(outcome["updated"])) < 1e-4
    assert max_logprob_error(old, completions(outcome["updated"])) > 0.1
    for key in ("weights restored", "rested"):
        assert max_logprob_error(old, completions(outcome[key])) < 1e-4


def test_random_states_are_unchanged_and_invalid_requests_are_refused(outcome):
    assert outcome["random state is kept"]
    assert outcome["context"] == CONTEXT
    assert outcome["nothing"] == []
    assert (
        f"a prompt of {CONTEXT} tokens leaves no space for a completion; the context length is {CONTEXT}"
        in outcome["too long"]
    )
    assert "vLLM allows at most 2" in outcome["too hot"]
    assert "1 are missing" in outcome["missing"]


@pytest.mark.parametrize("workers", ["0", "1"], ids=["alone", "with workers of its own"])
def test_subprocess_generates_the_same_and_receives_weights_through_a_folder(students, workers):
    old, new = students
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": workers}
    with SubprocessGenerator(backend_config(old, engine=ENGINE), "vllm", environment) as generator:
        assert_equal_completions(generator.generate(make_requests(), GREEDY), greedy_completions(old))
        generator.update_weights(new)
        assert max_logprob_error(new, generator.generate(make_requests(), SAMPLED)) < 1e-4
        assert_equal_completions(generator.generate(make_requests(), GREEDY), greedy_completions(new))


def test_invalid_engine_options_are_reported_from_the_subprocess(students):
    for option, message in (
        ("tensor_paralel_size=2", "did you mean"),
        ("logprobs_mode=raw_logits", "xtk sets this argument"),
    ):
        with pytest.raises(XtkError, match=message):
            SubprocessGenerator(backend_config(students[0], engine=[option]), "vllm", ENVIRONMENT)
