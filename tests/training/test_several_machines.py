"""Two machines, each with its own launcher: on one address, and in two network namespaces with a cable between."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

OPTIONS = ["--max-steps", 3, "--learning-rate", 1e-3, "--logging-steps", 1, "--loss", "ce", "--loss", "byte-kl"]


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("", 0))
        return int(some.getsockname()[1])


def on_machines(arguments: list[object], prefixes: list[list[str]], address: str, **env: str) -> list[str]:
    """Start the command on each machine; return what each wrote to stdout."""
    where = ["--num-machines", len(prefixes), "--main-process-ip", address, "--main-process-port", free_port()]
    command = [sys.executable, "-m", "xtk", "distill", *arguments, *where]
    machines = [
        subprocess.Popen(
            [*prefix, *map(str, [*command, "--machine-rank", rank])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        for rank, prefix in enumerate(prefixes)
    ]
    told = []
    for machine in machines:
        stdout, stderr = machine.communicate(timeout=240)
        assert machine.returncode == 0, stderr
        told.append(stdout)
    return told


@pytest.fixture(scope="module")
def expected(run, pair, cache, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("one")
    run("distill", pair.student, cache, *OPTIONS, "--per-device-train-batch-size", 8, "-o", "out", cwd=folder)
    return load_file(folder / "out" / "model.safetensors")


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for name, weight in load_file(folder / "model.safetensors").items():
        assert float((weight - expected[name]).abs().max()) <= 1e-5 * float(expected[name].abs().max()), name


@pytest.mark.long
def test_two_launchers_train_what_one_process_trains(pair, cache, expected, tmp_path):
    out = tmp_path / "out"
    arguments = [pair.student, cache, *OPTIONS, "--per-device-train-batch-size", 4, "-o", out]
    assert on_machines(arguments, [[], []], "127.0.0.1") == [f"{out}\n", ""]
    assert_same(out, expected)


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[list[str]]]:
    """Two network namespaces with a cable between them, 10.77.0.1 and 10.77.0.2; how a command is run in each."""
    names = (f"xtk-{os.getpid()}-a", f"xtk-{os.getpid()}-b")
    ends = [f"xtk{os.getpid() % 10_000}{end}" for end in "ab"]
    commands = [
        *(["netns", "add", name] for name in names),
        ["link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]],
        *(["-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", end]
          for at, (name, end) in enumerate(zip(names, ends, strict=True), start=1)),
        *(["-n", name, "link", "set", device, "up"]
          for name, end in zip(names, ends, strict=True) for device in ("lo", end)),
    ]  # fmt: skip
    try:
        for command in commands:
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        # A host's name leads nowhere there: gloo is told which end of the cable is its own.
        yield [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"]
               for name, end in zip(names, ends, strict=True)]  # fmt: skip
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces are made with ip")
def test_two_machines_with_a_cable_between_them(pair, cache, expected, tmp_path):
    out = tmp_path / "out"
    arguments = [pair.student, cache, *OPTIONS, "--per-device-train-batch-size", 2, "--num-processes", 2]
    with two_namespaces() as prefixes:
        told = on_machines([*arguments, "--parallel", "cp=2", "-o", out, "--gradient-accumulation-steps", 2], prefixes,
                           "10.77.0.1")  # fmt: skip
    assert told == [f"{out}\n", ""]
    assert_same(out, expected)
