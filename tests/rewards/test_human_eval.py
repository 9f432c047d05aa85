"""The reward `tests`: HumanEval and rows in the format of MBPP, run in the sandbox."""

import gzip
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.rewards.reward_spec import parse_reward
from xtk.rewards.sandbox import Sandbox


@pytest.fixture(scope="module", autouse=True)
def _require_sandbox():
    try:
        Sandbox().close()
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


@pytest.mark.slow
@pytest.mark.skipif("XTK_DATA" not in os.environ, reason="XTK_DATA names no folder with real data")
def test_canonical_solutions_of_human_eval_pass_and_broken_ones_fail():
    path = Path(os.environ["XTK_DATA"], "corpora", "HumanEval.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    reward = parse_reward("tests:seconds=60").load_reward()
    assert reward(rows[0]["canonical_solution"], rows[0]["prompt"], rows[0]) == 1
    with ThreadPoolExecutor(4) as pool:
        solution_scores = list(pool.map(lambda row: reward(row["canonical_solution"], row["prompt"], row), rows))
        broken_scores = list(pool.map(lambda row: reward("    return None\n", row["prompt"], row), rows))
    assert [row["task_id"] for row, score in zip(rows, solution_scores, strict=True) if score != 1] == []
    assert [row["task_id"] for row, score in zip(rows, broken_scores, strict=True) if score != 0] == []
    assert len(rows) == 164


ADD = {"prompt": 'def add(a, b):\n    """Add."""\n', "entry_point": "add", "test": "def check(candidate):\n"
       "    assert True\n    for n in range(4):\n        assert candidate(n, 1) == n + 1\n"}  # fmt: skip
MBPP = {
    "text": "Add.",
    "test_imports": ["import math"],
    "test_setup_code": "two = 2",
    "test_list": ["assert add(1, two) == 3", "assert math.isclose(add(0.1, 0.2), 0.3)", "assert add(1, 1) == 2"],
}


def test_code_is_extracted_from_completions_of_every_form():
    reward = parse_reward("tests").load_reward()
    function = "def add(a, b):\n    return a + b\n"
    for completion in (
        "    return a + b\n",
        function,
        f"Here it is:\n```python\n{function}```\nIt adds.",
        "```\n" + function,
    ):
        assert reward(completion, ADD["prompt"], ADD) == 1, completion
    draft_block, shell_block = "```python\ndef add(a, b):\n    return a - b\n```\n", "```bash\npip install numpy\n```\n"
    code_with_fence_in_docstring = (
        'def add(a, b):\n    """Add:\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
    )
    for completion in (
        f"<think>\nMaybe\n{draft_block}No.\n</think>\nSo:\n```python\n{function}```\n",
        f"[THINK]{draft_block}[/THINK]```python\n{function}```\n",
        f"{shell_block}Then:\n```python\n{function}```\n",
        f"A first try:\n{draft_block}Better:\n```python\n{function}```\n```python\nprint(add(1, 2))\n```\n",
        f"```python\n{code_with_fence_in_docstring}```\n",
        f"1. So:\n   ```python\n{function}   ```\n",
        f"```python\n{function.rstrip()}```",
        "<think>\nIt adds.\n</think>\n\n    return a + b\n",
        f"Here is the solution: ```python\n{function}\n```\nThis adds.",
        f"   ```python\n{function}```\nIt adds.",
        f"```python\n{function}```\nIt adds.".replace("\n", "\r\n"),
        f"```python\n{function.rstrip()}```\nIt adds.",
    ):
        assert reward(completion, ADD["prompt"], ADD) == 1, completion
    for completion in ("    return a - b\n", "I cannot.", "", "```python\n```", "    return a + b +\n"):
        assert reward(completion, ADD["prompt"], ADD) == 0, completion
    assert reward("    return a + b if a < 3 else 0\n", ADD["prompt"], ADD) == 0
    assert reward(function, "", MBPP) == 1
    assert reward("def add(a, b): return 3 if b == 2 else 2", "", MBPP) == 0
    assert math.isnan(reward(function, "", {"text": "no tests"}))
    assert math.isnan(reward(function, "", {"test_list": ["assert add(1,"]}))


def test_whitespace_answers_are_parsed_in_linear_time():
    """Students that repeat one token generate them; an earlier parser tried all indentation positions per space."""
    spaces, lines = " " * 60_000, "\n" * 60_000
    score = parse_reward("tests:seconds=2").load_reward()
    started = time.process_time()
    for answer in (spaces, lines, "\t\n" * 30_000, f"```\n{lines}", f"```python\n{spaces}"):
        assert score(answer, ADD["prompt"], ADD) == score(answer, "", MBPP) == 0
    assert time.process_time() - started < 5


def test_text_after_the_code_is_ignored():
    reward = parse_reward("tests").load_reward()
    body, function = "    return a + b\n", "def add(a, b):\n    return a + b\n"
    for suffix in ("\n\ndef add(a, b):\n    return 0", "\nprint(add(1))", "\nif __name__ == '__main__':\n    add()",
                   "\nclass A", "\n# Test\nassert add(1, 1) == 3", "\nassert False", "\n@test", "\nThis adds them.\n",
                   "\nclass ", "\n```\nDone."):  # fmt: skip
        assert reward(body + suffix, ADD["prompt"], ADD) == 1, suffix
    for suffix in ("\n\nIt adds a and b.", "\n[END of it]\n", '\n"""', "\nresult = (add(1,"):
        assert reward(function + suffix, ADD["prompt"], ADD) == 1, suffix
        assert reward(function + suffix, "", MBPP) == 1, suffix
    for invalid in ("    return a -\n" + body, "def helper(:\n", "It is\n" + body):
        assert reward(invalid, ADD["prompt"], ADD) == 0, invalid


# EvalPlus tests have this form: a function that compares floats with a tolerance, then inputs and results.
CLOSE_ASSERTION = """
import numpy as np

def assertion(out, exp, atol):
    if atol == 0 and isinstance(exp, float):
        atol = 1e-6
    if out != exp and atol != 0:
        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp
"""


def test_rows_with_additional_tests_of_evalplus_are_scored():
    reward = parse_reward("tests").load_reward()
    check = "\ndef check(candidate):\n    for given, exp in zip([[1, 2], [0.1, 0.2]], [3, 0.3]):\n"
    human_eval = {**ADD, "test": CLOSE_ASSERTION + check + "        assertion(candidate(*given), exp, 0)\n"}
    program = "\ninputs = [[1, 2], [0.1, 0.2]]\nfor given, exp in zip(inputs, [3, 0.3]):\n"
    program += "    assertion(add(*given), exp, 0)\n"
    mbpp = {
        "prompt": "Add.",
        "test_imports": [],
        "test_list": ["assert add(1, 2) == 3"],
        "test": CLOSE_ASSERTION + program,
    }
    for expression, expected in (("a + b", 1), ("a + b + 1e-3", 0), ("int(a + b)", 0)):
        assert reward(f"    return {expression}\n", human_eval["prompt"], human_eval) == expected
        assert reward(f"def add(a, b):\n    return {expression}\n", "", mbpp) == expected


SQUARES = """
inputs, results = [[n] for n in range(100)], [n * n for n in range(100)]
"""
LOOPS = {
    "evalplus": SQUARES + CLOSE_ASSERTION + "for inp, exp in zip(inputs, results):\n    assertion(f(*inp), exp, 0)\n",
    "asserts": "for n in range(100):\n    assert f(n) == n * n\n",
    "assignments": "for n in range(100):\n    got = f(n)\n    expected = n * n\n    assert got == expected\n",
    "straight": "".join(f"assert f({n}) == {n * n}\n" for n in range(100)),
    "two loops": "for n in range(10):\n    assert f(n) == n * n\ngot = f(10)\n"
    "for n in range(90):\n    assert got == 100 and f(n + 10) == (n + 10) ** 2\n",
}
ENDS = {"is wrong": "return -1", "raises": "raise ValueError", "exits": "import os; os._exit(0)"}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("form", LOOPS)
def test_code_that_fails_a_later_test_of_a_loop_is_not_rewarded(form, end):
    reward = parse_reward("tests").load_reward()
    code = f"def f(x):\n    if x < 10: return x * x\n    {ENDS[end]}\n"
    assert reward("def f(x): return x * x", "", {"test": LOOPS[form]}) == 1
    assert reward(code, "", {"test": LOOPS[form]}) == 0


@pytest.mark.parametrize("end", ENDS)
def test_code_that_fails_in_a_loop_of_check_is_not_rewarded(end):
    reward = parse_reward("tests").load_reward()
    check = "def check(candidate):\n    for n in range(100):\n        assertion(candidate(n), n * n, 0)\n"
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": CLOSE_ASSERTION + check}
    assert reward("    return x * x\n", row["prompt"], row) == 1
    assert reward(f"    if x < 10: return x * x\n    {ENDS[end]}\n", row["prompt"], row) == 0


def test_floats_within_the_tolerance_of_evalplus_are_rewarded():
    reward = parse_reward("tests").load_reward()
    row = {"test": CLOSE_ASSERTION + "for n in range(4):\n    assertion(half(n), n / 2, 0)\n"}
    assert reward("def half(x): return x / 2 + 1e-8", "", row) == 1
    assert reward("def half(x): return x / 2 + (1e-8 if x < 3 else 1)", "", row) == 0


@pytest.mark.parametrize("end", ENDS)
def test_values_from_before_a_failed_call_do_not_pass_tests(end):
    reward = parse_reward("tests").load_reward()
    tests = "got = [1, 2]\ngot = f(got)\nassert got == [1, 2]\nassert not got[2:]\n"
    assert reward(f"def f(x):\n    {ENDS[end]}\n", "", {"test": tests}) == 0


def test_tests_that_expect_an_exception_pass():
    reward = parse_reward("tests").load_reward()
    tests = "for n in range(4):\n    try:\n        f(n)\n        good = n % 2 == 0\n    except ValueError:\n"
    tests += "        good = n % 2 == 1\n    assert good\n"
    code = "def f(x):\n    if x % 2 == 1: raise ValueError\n"
    assert reward(code, "", {"test": tests}) == 1
    assert reward("def f(x): pass", "", {"test": tests}) == 0


def test_tests_that_call_only_builtins_are_not_scored():
    reward = parse_reward("tests").load_reward()
    assert math.isnan(reward("def sum(a, b): return a + b", "", {"test_list": ["assert sum(10, 15) == 25"]}))
    assert reward("def add(a, b): return a - b", "", MBPP) == 0


def test_text_after_code_with_unusual_line_separators_is_ignored():
    reward = parse_reward("tests").load_reward()
    for separators in ("\x0b\x0c", "\x1c\x1d\x1e", "\x85", "\u2028\u2029"):
        code = f"# {separators}\nmark = {separators!r}\ndef f(x):\n    # {separators * 3}\n    return x * x\n"
        code += "\nThis squares x.\n"
        assert reward(code, "", {"test_list": ["assert f(3) == 9"]}) == 1, separators
