"""Two students for vLLM, before and after a step; both have more embedding rows than their tokenizer has tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_on_cpu import make_llama

from xtk.text.tokenizer import Tokenizer

from .generation_requests import CONTEXT, PADDING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def students(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("vllm")
    rows = len(Tokenizer(make_llama(root / "old", context=CONTEXT))) + PADDING
    return tuple(
        make_llama(root / name, context=CONTEXT, vocab_size=rows, seed=seed) for seed, name in enumerate(("old", "new"))
    )
