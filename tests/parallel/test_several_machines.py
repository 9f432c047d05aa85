"""Runs on two machines, each with its own torchrun: at one address, and in two connected network namespaces."""

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
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def on_machines(arguments: list[object], prefixes: list[list[str]], address: str, processes: int = 1) -> list[str]:
    """Start the command on each machine; return what each wrote to stdout."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", len(prefixes), "--master-addr", address,
                "--master-port", free_port(), "--nproc-per-node", processes]  # fmt: skip
    command = ["-m", "xtk", "distill", *arguments]
    machines = [
        subprocess.Popen(
            [*prefix, *map(str, [*launcher, "--node-rank", rank, *command])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, prefix in enumerate(prefixes)
    ]
    outputs = []
    for machine in machines:
        stdout, stderr = machine.communicate(timeout=240)
        assert machine.returncode == 0, stderr
        outputs.append(stdout)
    return outputs


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
    """Connect two network namespaces, 10.77.0.1 and 10.77.0.2; yield the prefix of commands that run in each."""
    names = (f"xtk-{os.getpid()}-a", f"xtk-{os.getpid()}-b")
    links = [f"xtk{os.getpid() % 10_000}{link}" for link in "ab"]
    commands = [
        *(["netns", "add", name] for name in names),
        ["link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1]],
        *(["-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", link]
          for at, (name, link) in enumerate(zip(names, links, strict=True), start=1)),
        *(["-n", name, "link", "set", device, "up"]
          for name, link in zip(names, links, strict=True) for device in ("lo", link)),
    ]  # fmt: skip
    try:
        for command in commands:
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        # Host names do not resolve there, so gloo gets the name of its network interface.
        yield [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}"]
               for name, link in zip(names, links, strict=True)]  # fmt: skip
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces are made with ip")
def test_two_connected_network_namespaces_train_what_one_process_trains(pair, cache, expected, tmp_path):
    out = tmp_path / "out"
    arguments = [pair.student, cache, *OPTIONS, "--per-device-train-batch-size", 2]
    with two_namespaces() as prefixes:
        outputs = on_machines([*arguments, "--parallel", "cp=2", "-o", out, "--gradient-accumulation-steps", 2],
                              prefixes, "10.77.0.1", processes=2)  # fmt: skip
    assert outputs == [f"{out}\n", ""]
    assert_same(out, expected)
