"""Fixtures: a small teacher for vLLM, and a vLLM server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_on_cpu import Server, make_llama

CONTEXT = 320


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("vllm") / "teacher", context=CONTEXT)


@pytest.fixture(scope="session")
def server(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(teacher, tmp_path_factory.mktemp("log") / "server", "--served-model-name", "teacher")
    try:
        running.wait()
        yield running
    finally:
        running.stop()
