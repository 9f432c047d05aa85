"""User code that ends the process, raises or returns invalid values: the error names the code, and the run fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from xtk.errors import Terminated, XtkError
from xtk.rewards import code_tests as code_tests
from xtk.rewards.reward_spec import WeightedRewards, parse_reward
from xtk.rewards.sandbox import Sandbox
from xtk.rollouts.environments import CheckedEnvironment, load_environment
from xtk.user_code import user_code_errors

REWARDS = {
    "sys.exit(0)": ("import sys; sys.exit(0)", "ended the process: sys.exit(0)"),
    "sys.exit()": ("import sys; sys.exit()", "ended the process: sys.exit(None)"),
    "quit": ("raise SystemExit", "ended the process: sys.exit(None)"),
    "GeneratorExit": ("raise GeneratorExit", "failed: GeneratorExit"),
    "an exception of its own": ("class Own(BaseException): pass\n    raise Own('x')", "failed: Own: x"),
    "an exception without a message": (
        "class Own(Exception):\n        def __str__(self): raise ValueError\n    raise Own",
        "failed: Own (its message cannot be printed)",
    ),
    "a text": ("return '0.5'", "returned '0.5', which is not a number"),
    "a list": ("return [1.0, 2.0]", "returned [1.0, 2.0], which is not a number"),
    "an object": ("return {}", "returned {}, which is not a number"),
    "infinity": ("return float('inf')", "returned inf, which is not finite"),
    "more than float32 holds": ("return 1e308", "returned 1e+308, which is not finite in float32"),
    "a tensor of two": ("import torch; return torch.ones(2)", "which is not a number"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_invalid_reward_is_an_error_that_names_it(tmp_path, name):
    code, message = REWARDS[name]
    (tmp_path / "own.py").write_text(f"def score(completion, prompt, row):\n    {code}\n")
    rewards = WeightedRewards([parse_reward(f"{tmp_path / 'own.py'}:score")])
    subject = "--reward" if "return" in code else "the reward"
    with pytest.raises(XtkError, match=rf"{subject} .*own\.py:score") as raised:
        rewards("text", "prompt", {})
    assert message in str(raised.value)
    assert "completion 'text'" in str(raised.value)


def test_process_forked_by_a_reward_does_not_continue_the_command(tmp_path):
    (tmp_path / "own.py").write_text("import os\ndef score(completion, prompt, row):\n    os.fork()\n    return 1.0\n")
    code = textwrap.dedent(f"""
        from xtk.rewards.reward_spec import WeightedRewards, parse_reward
        rewards = WeightedRewards([parse_reward({str(tmp_path / "own.py") + ":score"!r})])
        for number in range(3):
            print(rewards("text", "prompt", {{}})[0], flush=True)
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "1.0\n" * 3, result.stdout


def test_user_code_changes_neither_the_row_nor_the_current_directory(tmp_path):
    (tmp_path / "own.py").write_text(
        textwrap.dedent("""
        import os
        os.chdir("/")
        def score(completion, prompt, row):
            row["answer"] = "999"
            row["list"].append(row)
            os.chdir("/")
            return 1.0
        def see(completion, prompt, row):
            return float(row == {"answer": "4", "list": []})
        class Own:
            def reset(self, record):
                record["list"].append(record)
            def step(self, text):
                return "", True
    """)
    )
    row, directory = {"answer": "4", "list": []}, Path.cwd()
    rewards = WeightedRewards([parse_reward(f"{tmp_path / 'own.py'}:{name}") for name in ("score", "see")])
    assert list(rewards("4", "prompt", row)[1].values()) == [1.0, 1.0]
    CheckedEnvironment(load_environment(f"{tmp_path / 'own.py'}:Own"), row)
    assert row == {"answer": "4", "list": []}
    assert Path.cwd() == directory


@pytest.mark.parametrize(("code", "message"), [
    ("import sys; sys.exit(0)", "ended the process: sys.exit(0)"), ("def f(", "failed: SyntaxError"),
])  # fmt: skip
def test_module_that_ends_the_process_is_an_error_that_names_it(tmp_path, code, message):
    (tmp_path / "own.py").write_text(code + "\ndef score(*given): return 1.0\n")
    with pytest.raises(XtkError, match=r"importing .*own\.py") as raised:
        parse_reward(f"{tmp_path / 'own.py'}:score").load_reward()
    assert message in str(raised.value)


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "reward"])
@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise GeneratorExit"])
def test_environment_that_ends_the_process_is_an_error_that_names_it(tmp_path, method, code):
    methods = {"__init__": "self", "reset": "self, record", "step": "self, text", "reward": "self"}
    bodies = {"step": "return 'x', False", "reward": "return 1.0"} | {method: code}
    lines = [
        f"    def {name}({parameters}):\n        {bodies.get(name, 'return None')}\n"
        for name, parameters in methods.items()
    ]
    (tmp_path / "own.py").write_text("class Own:\n" + "".join(lines))
    with pytest.raises(XtkError, match=f"{method} of the environment"):
        play(load_environment(f"{tmp_path / 'own.py'}:Own"))


def play(environment):
    checked = CheckedEnvironment(environment, {})
    checked.step("text")
    checked.reward()


@pytest.mark.parametrize(("returned", "message"), [
    ("'x', 'no'", "step of the environment returned"), ("'x'", "step of the environment returned"),
    ("'x', True, 1", "step of the environment returned"), ("1, True", "step of the environment returned"),
])  # fmt: skip
def test_environment_that_returns_invalid_values_is_an_error(tmp_path, returned, message):
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def reset(self, record): pass\n    def step(self, text): return {returned}\n"
    )
    with pytest.raises(XtkError, match=message):
        play(load_environment(f"{tmp_path / 'own.py'}:Own"))


def test_signals_pass_through_user_code():
    for number, exception in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        # A shell starts programs in the background with SIGINT ignored.
        handlers = [
            signal.signal(signal.SIGTERM, raise_terminated),
            signal.signal(signal.SIGINT, signal.default_int_handler),
        ]
        timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
        timer.start()
        try:
            with pytest.raises(exception):
                wait_in_user_code()
        finally:
            timer.join()
            signal.signal(signal.SIGTERM, handlers[0])
            signal.signal(signal.SIGINT, handlers[1])


def wait_in_user_code():
    with user_code_errors("the reward"):
        time.sleep(60)


def raise_terminated(number, frame):
    raise Terminated(128 + number)


def test_processes_forked_by_user_code_keep_their_exit_codes():
    program = """
        import os
        from xtk.user_code import user_code_errors
        with user_code_errors("the reward"):
            child = os.fork()
            if child == 0:
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert result.stdout == "7\n"


def test_rollout_with_a_reward_that_exits_fails_without_output(run, pair, tmp_path):
    (tmp_path / "own.py").write_text("def score(completion, prompt, row):\n    import sys; sys.exit(0)\n")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "One"}) + "\n" + json.dumps({"prompt": "Two"}) + "\n")
    result = run("rollout", pair.student, "p.jsonl", "--reward", "own.py:score", "--max-completion-length", 4,
                 "-o", "r.jsonl", code=1, cwd=tmp_path)  # fmt: skip
    assert "the reward own.py:score ended the process" in result.stderr
    assert "row 0 of the data" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(("row", "message"), [
    ({"test_list": 5}, "the column test_list has 5, but --reward tests needs a string, or a list of lines"),
    ({"test_list": [1]}, "the column test_list has [1]"),
    ({"test": {}, "test_list": ["assert f()"]}, "the column test has {}"),
    ({"test_list": ["assert f()"], "test_imports": True}, "the column test_imports has True"),
    ({"test_list": ["assert f()"], "entry_point": 3}, "the column entry_point has 3"),
    ({"test_list": ["assert f()"], "test_setup_code": ["a"]}, "the column test_setup_code has ['a']"),
    ({"test": "assert f()", "entry_point": "f", "prompt": 5}, "the column prompt has 5"),
])  # fmt: skip
def test_columns_of_a_wrong_type_are_an_error_that_names_them(row, message):
    with pytest.raises(XtkError) as raised:
        code_tests.CodeTestsReward()("text", "prompt", row)
    assert message in str(raised.value)


def test_row_with_a_column_of_a_wrong_type_is_named(run, pair, tmp_path):
    rows = [{"prompt": "One", "test_list": ["assert f() == 1"]}, {"prompt": "Two", "test_list": 5}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("evaluate-answers", pair.student, "p.jsonl", "--reward", "tests", code=1, cwd=tmp_path)
    assert "the column test_list has 5" in result.stderr
    assert "row 1 of the data" in result.stderr
    assert "Traceback" not in result.stderr


RAISING_CODE = """
class Own(KeyError): pass
def type_error(): raise TypeError("no", 3)
def decode(): b"\\xff".decode()
def encode(): "\\ud800".encode()
def missing(): open("no such file")
def imports(): import no_such_module
def leaves(): raise SystemExit(2)
def interrupts(): raise KeyboardInterrupt
def stops(): next(iter([]))
def own(): raise Own("key")
def group(): raise ExceptionGroup("several", [ValueError(1)])
def odd():
    class Odd(ValueError):
        def __str__(self): raise TypeError
    raise Odd(object())
"""
RAISED_BY = {
    "TypeError": "type_error", "UnicodeDecodeError": "decode", "UnicodeEncodeError": "encode",
    "FileNotFoundError": "missing", "ModuleNotFoundError": "imports", "SystemExit": "leaves",
    "KeyboardInterrupt": "interrupts", "StopIteration": "stops", "KeyError": "own", "ValueError": "odd",
}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    try:
        with Sandbox() as started:
            yield started
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


@pytest.mark.parametrize("name", RAISED_BY)
def test_code_that_raises_the_expected_exception_passes(sandbox, name):
    tests = f"try:\n    {RAISED_BY[name]}()\nexcept {name} as error:\n    assert type(error).__name__ == {name!r}\n"
    tests += "else:\n    assert False\n"
    assert sandbox.test([RAISING_CODE], tests) is True
    other = "LookupError" if name != "KeyError" else "OSError"
    assert sandbox.test([RAISING_CODE], tests.replace(f"except {name}", f"except {other}")) is False


def test_code_tests_see_the_attributes_of_exceptions(sandbox):
    tests = """
        try:
            type_error()
        except TypeError as error:
            assert error.args == ("no", 3)
        try:
            decode()
        except UnicodeDecodeError as error:
            assert error.start == 0 and error.object == b"\\xff"
        try:
            missing()
        except OSError as error:
            assert error.errno == 2
    """
    assert sandbox.test([RAISING_CODE], textwrap.dedent(tests)) is True


def test_errors_of_the_code_are_distinguished_from_errors_of_its_tests(sandbox):
    assert sandbox.test([RAISING_CODE], "x = imports()\nassert x") is False
    assert sandbox.test([RAISING_CODE], "import no_such_module\nassert imports()") is None
    assert sandbox.test([RAISING_CODE], "x = group()\nassert x") is False
    assert sandbox.test([RAISING_CODE], "x = leaves()\nassert x") is False


def test_tests_that_catch_everything_do_not_hide_that_the_code_exited(sandbox):
    tests = "try:\n    f()\nexcept BaseException:\n    assert True is True\nassert 1 == 1\n"
    assert sandbox.test(["import os\ndef f(): os._exit(0)"], tests) is False
    assert sandbox.test(["def f(): raise ValueError"], tests) is True
    assert sandbox.test(["def f(x): pass"], tests.replace("f()", "f(object())")) is None
