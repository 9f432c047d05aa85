"""The contract of every command: stdout, --json, pipes, re-runs, configuration, exit codes."""

from __future__ import annotations

import json

import pytest
import yaml
from xtk_processes import run_here


def only_line(done) -> str:
    (line,) = done.stdout.splitlines()
    return line


def test_commands_print_only_the_output_path(run, pair, corpus, projection, cache, tmp_path):
    for arguments in (
        ("build-projection", pair.student, pair.teacher, "-o", "p"),
        ("prune-projection", "p", "--top-k", 2, "-o", "p2"),
        ("cache-teacher", pair.teacher, corpus, "-o", "c"),
        ("distill", pair.student, "c", "--projection", "p2", "--max-steps", 2, "-o", "out"),
    ):
        assert only_line(run(*arguments, cwd=tmp_path)) == arguments[-1]


@pytest.mark.slow
def test_json_output_has_the_expected_fields(run, pair, corpus, projection, cache, tmp_path):
    result = json.loads(
        only_line(run("build-projection", pair.student, pair.teacher, "-o", "p", "--json", cwd=tmp_path))
    )
    assert result["path"] == "p"
    assert result["kind"] == "projection"
    assert result["rows"] == 656
    assert result["entries"] > 400
    assert 0 <= result["unmapped_mass"] < 0.2
    result = json.loads(only_line(run("prune-projection", "p", "--top-k", 1, "-o", "p1", "--json", cwd=tmp_path)))
    assert {"path", "kind", "rows", "entries", "unmapped_mass"} <= set(result)
    result = json.loads(only_line(run("cache-teacher", pair.teacher, corpus, "-o", "c", "--json", cwd=tmp_path)))
    assert result["documents"] == 40
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "c").glob("shard-*.arrow"))
    assert result["positions"] > 40
    done = run("distill", pair.student, "c", "--projection", "p", "--max-steps", 2, "-o", "out", "--json", cwd=tmp_path)
    result = json.loads(only_line(done))
    assert result["kind"] == "student"
    assert result["steps"] == 2
    assert {"loss", "ce", "p-kl", "gradient_norm", "learning_rate"} <= set(result["metrics"])
    result = json.loads(only_line(run("evaluate", "out", corpus, "--json", cwd=tmp_path)))
    assert {"model", "data", "bits_per_byte", "bytes", "documents"} <= set(result)
    for path in ("p", "c", "out", "c/shard-00000.arrow", pair.student, projection):
        record = json.loads(only_line(run("inspect", path, "--json", cwd=tmp_path)))
        assert {"path", "kind", "header", "statistics"} <= set(record)


@pytest.mark.slow
def test_align_prints_spans_that_cover_the_text(run, pair):
    from xtk.text.tokenizer import Tokenizer

    text = "Anna has 1234 apples.\nTab\tand 日本 😀"
    done = run(
        "align", pair.student, pair.teacher, stdin=json.dumps({"text": text}) + "\n" + json.dumps({"text": ""}) + "\n"
    )
    record, empty = map(json.loads, done.stdout.splitlines())
    assert record["text"] == text
    assert empty["spans"] == []
    student, teacher = (Tokenizer(folder).vocabulary for folder in (pair.student, pair.teacher))
    covered = b""
    for s0, s1, t0, t1 in record["spans"]:
        student_bytes = b"".join(student.bytes_of(token) for token in record["student_ids"][s0:s1])
        assert student_bytes == b"".join(teacher.bytes_of(token) for token in record["teacher_ids"][t0:t1])
        covered += student_bytes
    assert covered == text.encode()
    assert only_line(run("align", pair.student, pair.teacher, text)) == done.stdout.splitlines()[0]


@pytest.mark.slow
def test_align_prints_colors_on_a_terminal(pair):
    import os
    import pty
    import subprocess
    import sys

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "xtk", "align", str(pair.student), str(pair.teacher), "Anna has 1234 apples"],
        stdout=follower,
        stderr=subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm-256color"},
    )
    os.close(follower)
    output = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    process.communicate()
    assert process.returncode == 0
    assert b"\x1b[" in output
    assert b"student" in output
    assert b"spans" in output


def test_a_json_line_on_stdin_is_accepted_as_a_path(run, projection, tmp_path):
    line = json.dumps({"path": str(projection), "kind": "projection"})
    assert only_line(run("prune-projection", "-", "--top-k", 1, "-o", "p1", stdin=line + "\n", cwd=tmp_path)) == "p1"


@pytest.mark.slow
def test_a_repeated_command_reuses_its_output_and_other_options_are_refused(
    run, pair, corpus, cache, projection, tmp_path
):
    requests = (
        (("build-projection", pair.student, pair.teacher, "-o", "p"), ("--method", "exact")),
        (("prune-projection", projection, "--top-k", 2, "-o", "p2"), ("--min-weight", 0.5)),
        (("cache-teacher", pair.teacher, corpus, "-o", "c"), ("--top-k", 5)),
        (("distill", pair.student, cache, "--projection", projection, "--max-steps", 1, "-o", "out"), ("--seed", 7)),
    )
    for arguments, other_options in requests:
        run(*arguments, cwd=tmp_path)
        output = tmp_path / arguments[-1]
        before = {path: path.stat().st_mtime_ns for path in [output, *output.glob("*")]}
        assert only_line(run(*arguments, cwd=tmp_path)) == arguments[-1]
        assert {path: path.stat().st_mtime_ns for path in [output, *output.glob("*")]} == before
        done = run(*arguments, *other_options, cwd=tmp_path, code=1)
        assert "--force" in done.stderr
        assert done.stdout == ""
        assert only_line(run(*arguments, *other_options, "--force", cwd=tmp_path)) == arguments[-1]
        run(*arguments, cwd=tmp_path, code=1)


def test_the_same_inputs_give_the_same_bytes_in_another_folder(run, pair, corpus, cache, projection, tmp_path):
    run("build-projection", pair.student, pair.teacher, "-o", tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == projection.read_bytes()
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", tmp_path / "c")
    for path in cache.iterdir():
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes()


def test_flags_override_the_config_file_and_snake_case_is_accepted(run, pair, corpus, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"top_k": 3, "shard-tokens": 300, "output": "c"}))
    run("cache-teacher", pair.teacher, corpus, "--config", "run.yaml", "--shard_tokens", 400, cwd=tmp_path)
    header = json.loads((tmp_path / "c" / "manifest.json").read_text())["header"]
    assert header["options"]["top_k"] == 3
    assert header["options"]["shard_tokens"] == 400


def test_a_single_value_in_a_config_file_is_read_as_a_list_of_one(run, pair, cache, tmp_path):
    (tmp_path / "run.yaml").write_text("loss: ce\nmax-steps: 1\n")
    done = run("distill", pair.student, cache, "--config", "run.yaml", "-o", "my out", "--json", cwd=tmp_path)
    assert "ce" in json.loads(only_line(done))["metrics"]


def test_an_unknown_config_key_is_refused_with_a_suggestion(pair, corpus, tmp_path):
    (tmp_path / "run.yaml").write_text("topk: 3\n")
    done = run_here("cache-teacher", pair.teacher, corpus, "--config", "run.yaml", "-o", "c", cwd=tmp_path, code=1)
    assert "did you mean top-k?" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("top-k: [3, 4]", "top-k takes one value, but the --config file has a list"),
        ("top-k: {a: 3}", "top-k takes one value, but the --config file has a mapping"),
        ("top-k:", "top-k in the --config file has no value"),
        ("top-k: ~", "top-k in the --config file has no value"),
        ("top-k: 3\ntop_k: 4", "the --config file sets top-k twice"),
        ("as_json: true", "no option called 'as_json'"),
        ("- top-k", "not a mapping of options"),
        ("top-k: {", "not valid YAML"),
    ],
)
def test_an_invalid_config_file_is_refused(pair, corpus, tmp_path, content, message):
    (tmp_path / "run.yaml").write_text(content)
    done = run_here("cache-teacher", pair.teacher, corpus, "--config", "run.yaml", "-o", "c", cwd=tmp_path, code=1)
    assert message in done.stderr
    assert "run.yaml" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "c").exists()


def test_the_config_keys_are_the_options_of_the_command_line(run, pair, corpus, tmp_path):
    (tmp_path / "run.yaml").write_text("zzzz: 1")
    done = run_here("cache-teacher", pair.teacher, corpus, "--config", "run.yaml", "-o", "c", cwd=tmp_path, code=1)
    listed = " ".join(done.stderr.partition("one of: ")[2].split()).split(", ")
    help_text = run("cache-teacher", "--help-all").stdout
    assert {"json", "output", "top-k"} <= set(listed)
    assert all(f"--{name}" in help_text or name.upper() in help_text for name in listed)
    assert not {"o", "q", "as-json", "config", "help"} & set(listed)


def test_config_values_are_read_as_on_the_command_line(run, pair, cache, projection, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"mixed-precision: no\nprojection: {projection}\nmax-steps: 1\nloss: [p-kl]\njson: yes\nquiet: false\n"
    )
    done = run("distill", pair.student, cache, "--config", "run.yaml", "-o", "007", cwd=tmp_path)
    assert json.loads(only_line(done))["path"] == "007"
    assert done.stderr
    (tmp_path / "null.yaml").write_text("output: 'null'\nmethod: exact\n")
    assert (
        only_line(run("build-projection", pair.student, pair.teacher, "--config", "null.yaml", cwd=tmp_path)) == "null"
    )


def test_several_processes_refuse_stdin_that_only_the_config_file_names(pair, cache, projection, tmp_path):
    (tmp_path / "run.yaml").write_text('projection: "-"\nnum-processes: 2\n')
    done = run_here("distill", pair.student, cache, "--config", "run.yaml", "-o", "out", cwd=tmp_path,
               stdin=f"{projection}\n", code=1)  # fmt: skip
    assert "on the command line" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("distill",), ("inspect", "--no-such-option", "x"), ("evaluate", "a")]
)
def test_usage_errors_exit_with_2(arguments):
    done = run_here(*arguments, code=2)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_quiet_prints_nothing_to_stderr(run, pair, corpus, tmp_path):
    done = run("cache-teacher", pair.teacher, corpus, "-o", "c", "--quiet", cwd=tmp_path)
    assert done.stderr == ""


@pytest.mark.slow
def test_a_closed_output_pipe_ends_the_command_without_a_traceback(pair, tmp_path):
    import subprocess
    import sys

    (tmp_path / "many.jsonl").write_text('{"text": "many words and 12345 numbers"}\n' * 20000)
    line = f"{sys.executable} -m xtk align {pair.student} {pair.teacher} many.jsonl | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.slow
def test_a_teacher_with_the_students_tokenizer_needs_no_projection(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.student, corpus, "--top-k", 656, "--precision", "float32", "-o", "c", cwd=tmp_path)
    done = run(
        "distill", pair.student, "c", "--loss", "forward-kl", "--max-steps", 1, "-o", "out", "--json", cwd=tmp_path
    )
    # The student is its own teacher, so the loss is zero.
    assert abs(json.loads(only_line(done))["metrics"]["forward-kl"]) < 1e-5


@pytest.mark.slow
def test_metrics_are_logged_to_tensorboard(run, pair, cache, projection, tmp_path):
    pytest.importorskip("tensorboard")
    run("distill", pair.student, cache, "--projection", projection, "--max-steps", 2, "--report-to", "tensorboard",
        "-o", "out", cwd=tmp_path)  # fmt: skip
    assert list((tmp_path / "out" / "trackers").rglob("events.out.*"))
