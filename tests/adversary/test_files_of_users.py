"""Files of the user in the output folder of a command are kept, whatever their names."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import interrupted_runs
import pytest
from xtk_processes import run_xtk

from xtk.errors import XtkError
from xtk.files.atomic_files import atomic_write
from xtk.files.output import write_output, writer_lock
from xtk.files.storage_folders import LocalFolder

TRAINING = ["--loss", "ce", "--max-steps", 6, "--save-steps", 2, "--save-total-limit", 1, "--logging-steps", 1,
            "--per-device-train-batch-size", 4]  # fmt: skip


@pytest.mark.slow
def test_resumed_run_removes_no_file_of_the_user(run, pair, corpus, tmp_path):
    out = tmp_path / "out"
    command = ["distill", pair.student, corpus, *TRAINING, "-o", out]
    process = interrupted_runs.start_run(command)
    interrupted_runs.wait_for_path(out / "checkpoint-2", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "xtk.json").exists()
    user_files = [
        "checkpoint-1/mine",
        "best-1/mine",
        "checkpoint-2/note.txt",
        "checkpoint-6/my.txt",
        "checkpoint-5/config.json",
    ]
    for name in user_files:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    stderr = run(*command).stderr
    kept = {path.name for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"mine"}
    assert kept == {Path(name).name for name in user_files}
    assert "checkpoint-1 to checkpoint-1.replaced-1" in stderr
    assert "checkpoint-2 to checkpoint-2.replaced-1" in stderr


@pytest.mark.slow
def test_finished_run_keeps_user_files_named_like_files_of_a_student(run, pair, corpus, tmp_path):
    out = tmp_path / "out"
    command = ["distill", pair.student, corpus, "--loss", "ce", "--max-steps", 2, "-o", out]
    run(*command, "--max-seconds", 0.001, code=75)
    for name in ("README.md", "config.json"):
        (out / name).write_text(f"mine: {name}")
    stderr = run(*command).stderr
    for name in ("README.md", "config.json"):
        assert (out / f"{name}.replaced-1").read_text() == f"mine: {name}"
        assert f"moved {out / name} to {name}.replaced-1" in stderr
    run("inspect", out, "--verify")
    remaining = {
        path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and "replaced" not in path.name
    }
    (out / "xtk.json").unlink()  # as after a kill just before the end of the run
    shutil.rmtree(out / "checkpoint-1", ignore_errors=True)
    assert "moved" not in run(*command).stderr
    assert {path.name for path in out.iterdir() if path.is_file() and "replaced" not in path.name} == set(remaining)


@pytest.mark.slow
def test_user_adapter_in_an_unfinished_run_is_renamed_but_one_left_by_a_kill_is_not(run, pair, corpus, tmp_path):
    out = tmp_path / "out"
    command = ["distill", pair.student, corpus, "--loss", "ce", "--lora-r", 2, "--max-steps", 2, "--save-steps", 1,
               "-o", out]  # fmt: skip
    run(*command)
    adapter = {path.name: path.read_bytes() for path in (out / "adapter").iterdir()}
    assert set(adapter) == {"adapter_config.json", "adapter_model.safetensors"}
    (out / "xtk.json").unlink()  # as after a kill just after the adapter was written
    run(*command)
    assert sorted(path.name for path in out.iterdir() if "adapter" in path.name) == ["adapter"]
    assert {path.name: path.read_bytes() for path in (out / "adapter").iterdir()} == adapter
    (out / "xtk.json").unlink()
    (out / "adapter" / "README.md").write_text("mine")
    stderr = run(*command).stderr
    assert f"moved {out / 'adapter'} to adapter.replaced-1" in stderr
    assert (out / "adapter.replaced-1" / "README.md").read_text() == "mine"
    assert {path.name: path.read_bytes() for path in (out / "adapter").iterdir()} == adapter
    targets = json.loads(adapter["adapter_config.json"])["target_modules"]
    assert targets == sorted(targets)


@pytest.mark.slow
def test_user_files_among_stored_rollouts_are_kept(run, pair, tmp_path):
    """The files are in the folder of all batches, in one that a checkpoint removes, and in one of the last steps."""
    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} plus {n} is"}) + "\n" for n in range(8)))
    command = ["distill-on-policy", pair.student, prompts, "--teacher", f"{pair.teacher}:top_k=8", "--loss",
               "byte-kl", "--max-completion-length", 4, "--max-steps", 3, "--save-steps", 1, "-o", out]  # fmt: skip
    run(*command, "--max-seconds", 0.001, code=75)
    user_files = [
        out / "rollout_batches" / name
        for name in (
            "note.txt",
            "000000/note.txt",
            "000000/0/note.txt",
            "000002/note.txt",
            "000002/0/note.txt",
            "my/note.txt",
        )
    ]
    for path in user_files:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    run(*command)
    remaining = [path for path in (out / "rollout_batches").rglob("*") if path.is_file()]
    assert sum(path.read_bytes() == b"mine" for path in remaining) == len(user_files)


@pytest.mark.slow
def test_two_evaluations_do_not_write_the_same_output_at_once(run, pair, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"text": "Anna has", "answer": "4"}\n')
    out = tmp_path / "out.jsonl"
    command = ["evaluate-answers", pair.student, tmp_path / "prompts.jsonl", "--reward", "gsm8k",
               "--max-completion-length", 4, "-o", out]  # fmt: skip
    with writer_lock(out, "file"):
        stderr = run(*command, code=1).stderr
    assert "another process is writing this" in stderr
    assert not out.exists()
    run(*command)
    assert out.exists()
    assert not list(tmp_path.glob(".xtk-*"))


def test_temporary_files_of_a_killed_process_are_removed_but_not_those_in_use(tmp_path):
    program = """if True:
        import pathlib, sys
        from xtk.files.atomic_files import temporary_name
        name = temporary_name("out")
        pathlib.Path(sys.argv[1], name).write_text("written")
        print(name, flush=True)
        sys.stdin.read()
    """
    killed, live = (
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    )
    killed_file, live_file = (process.stdout.readline().decode().strip() for process in (killed, live))
    killed.kill()
    killed.communicate()
    assert {path.name for path in tmp_path.iterdir()} == {killed_file, live_file}
    with write_output(tmp_path / "equal") as first:
        first.write_text("result")
        (tmp_path / "equal").write_text("result")  # another process with the same request
    (tmp_path / "equal").unlink()
    with atomic_write(tmp_path / "out") as first, atomic_write(tmp_path / "out") as second:
        first.write_text("first")
        second.write_text("second")
        assert first.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", live_file}
    live.communicate()


def test_output_file_that_appears_during_writing_is_moved_aside(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    with write_output(path) as temporary:
        temporary.write_text("result")
        path.write_text("mine")
    assert path.read_text() == "result"
    assert (tmp_path / "out.jsonl.replaced-1").read_text() == "mine"
    assert f"moved {path} to out.jsonl.replaced-1" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2


LATE_FILE_SCRIPT = """
import sys
from pathlib import Path
import {module}
written = {module}.{function}
def late(*given, **options):
    Path({out!r}).write_text("mine")
    return written(*given, **options)
{module}.{function} = late
from xtk.__main__ import main
sys.argv[0] = "xtk"
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option", "write_function"),
    [
        (["align", "STUDENT", "TEACHER", "CORPUS"], "--html", "xtk.pages.html_page.write_page"),
        (["inspect", "CACHE"], "--html", "xtk.pages.html_page.write_page"),
        (["cache", "export", "CACHE"], "-o", "xtk.importers.cache_export._rows"),
        (["build-projection", "STUDENT", "TEACHER"], "-o", "xtk.projection.file.write_projection"),
        (["prune-projection", "PROJECTION", "--top-k", "1"], "-o", "xtk.projection.file.write_projection"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_output_file_that_appears_after_the_check_of_a_command_is_kept(
    pair, corpus, cache, projection, tmp_path, command, option, write_function
):
    """The file appears when the result is ready: after the check of the output path, before anything is written."""
    out = tmp_path / "out"
    names = {"STUDENT": pair.student, "TEACHER": pair.teacher, "CORPUS": corpus, "CACHE": cache,
             "PROJECTION": projection}  # fmt: skip
    module, _, function = write_function.rpartition(".")
    code = LATE_FILE_SCRIPT.format(module=module, function=function, out=str(out))
    arguments = [str(names.get(word, word)) for word in command]
    result = subprocess.run([sys.executable, "-c", code, *arguments, option, str(out)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"moved {out} to out.replaced-1" in result.stderr
    assert (tmp_path / "out.replaced-1").read_text() == "mine"
    assert out.stat().st_size > 100


def test_output_folder_that_cannot_be_created_is_refused_without_waiting(pair, cache):
    result = run_xtk("distill", pair.student, cache, "--max-steps", 1, "-o", "/proc/nothing", code=1, timeout=60)
    assert "/proc/nothing" in result.stderr
    assert "Traceback" not in result.stderr


def test_exclusive_write_keeps_a_file_that_already_exists(tmp_path):
    folder = LocalFolder(tmp_path)
    for name in ("shard-00005.arrow", "manifest.json"):
        (tmp_path / name).write_text("mine")
        with (
            pytest.raises(XtkError, match="this file already exists, and this command did not write it"),
            folder.write(name, exclusive=True) as temporary,
        ):
            temporary.write_text("xtk's")
        assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_manifest_that_appears_while_a_cache_is_written_is_kept(pair, tmp_path):
    out = tmp_path / "out"
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} apples " * 30}) + "\n" for n in range(300)))
    command = ["cache-teacher", str(pair.teacher), str(texts), "--shard-tokens", "400", "-o", str(out)]
    with subprocess.Popen([sys.executable, "-m", "xtk", *command], stderr=subprocess.PIPE, text=True) as process:
        while not (out / "shard-00001.arrow").exists() and process.poll() is None:
            time.sleep(0.001)
        (out / "manifest.json").write_text("mine")
        _, stderr = process.communicate()
    assert process.returncode == 1, stderr
    assert f"this file already exists, and this command did not write it\n  where: {out}/manifest.json" in stderr
    assert (out / "manifest.json").read_text() == "mine"
    (out / "manifest.json").unlink()
    run_xtk(*command)
    run_xtk("inspect", out, "--verify")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_repair_named_by_inspect_restores_a_cache_of_one_shard(run, pair, corpus, tmp_path, damage):
    cache = tmp_path / "cache"
    command = ["cache-teacher", pair.teacher, corpus, "-o", cache]
    run(*command)
    original = {path.name: path.read_bytes() for path in cache.iterdir()}
    shard = cache / "shard-00000.arrow"
    content = bytearray(original[shard.name])
    content[len(content) // 2] ^= 1
    shard.write_bytes(content[:5000] if damage == "truncated" else content)
    assert f"remove {shard} and run the same" in run("inspect", cache, "--verify", code=1).stderr
    shard.unlink()
    run(*command)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == original


def test_force_replaces_a_cache_with_an_empty_manifest(run, pair, cache, corpus, tmp_path):
    shutil.copytree(cache, tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").write_text("")
    command = ["cache-teacher", pair.teacher, corpus, "--top-k", 4, "-o", tmp_path / "cache"]
    run(*command, code=1)
    run(*command, "--force")


def test_user_tokenizer_in_a_folder_marked_as_an_unfinished_cache_is_kept(run, pair, corpus, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.student / name, folder)
    (folder / ".xtk-unfinished").write_text("{}")
    assert (
        "this folder contains files that xtk did not write"
        in run("cache-teacher", pair.teacher, corpus, "-o", folder, code=1).stderr
    )
    assert (folder / "tokenizer.json").read_bytes() == (pair.student / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_dataloader_workers_exit_when_the_run_is_killed_while_they_start(pair, corpus, tmp_path):
    out = tmp_path / "out"
    command = ["distill", pair.student, corpus, *TRAINING, "--dataloader-num-workers", 3, "-o", out]
    process = interrupted_runs.start_run(command)
    deadline = time.monotonic() + 120
    while not (workers := _worker_pids(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    while any(map(_is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers
    assert not any(map(_is_alive, workers))


def _worker_pids(parent_pid: int) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command_line = (path / "cmdline").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == parent_pid and b"spawn_main" in command_line:
            pids.append(int(path.name))
    return pids


def _is_alive(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
