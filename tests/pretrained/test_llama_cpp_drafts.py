"""llama.cpp with a draft that xtk made for a pretrained target: the greedy text of the target, accepted proposals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from installed_smollm2 import find_smollm2
from llama_cpp_server import run_server
from small_drafts import PROMPTS, make_draft

from xtk.text.tokenizer import Tokenizer

K, LENGTH = 3, 24


def complete(url: str, ids: list[int]) -> dict[str, Any]:
    """Return llama.cpp's answer, with token ids, to a prompt of token ids."""
    body = {"prompt": ids, "n_predict": LENGTH, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    request = urllib.request.Request(
        url.removesuffix("/v1") + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def test_a_draft_of_another_family_generates_in_llama_cpp(run, tmp_path):
    converter = Path(os.environ.get("XTK_GGUF_CONVERTER", ""))
    if not converter.is_file():
        pytest.skip("without llama.cpp's converter (`nox -s real` has it): XTK_GGUF_CONVERTER names it")
    target = find_smollm2()
    draft = make_draft(run, target, tmp_path, length=LENGTH)
    run("export", draft, "-o", tmp_path / "release", timeout=600)
    file = tmp_path / "draft.gguf"
    command = [sys.executable, converter, tmp_path / "release", "--outfile", file, "--outtype", "f16"]
    subprocess.run(command, check=True, capture_output=True)
    tokenizer = Tokenizer(tmp_path / "release")
    prompts = [[*tokenizer.start_ids, *one.ids.tolist()] for one in tokenizer.encode(PROMPTS)]
    with run_server(target, tmp_path / "alone.log") as url:
        alone = [complete(url, ids)["tokens"] for ids in prompts]
    flags = ["--draft", str(file), "--num-draft-tokens", str(K)]
    with run_server(target, tmp_path / "draft.log", *flags) as url:
        answers = [complete(url, ids) for ids in prompts]
    assert [one["tokens"] for one in answers] == alone
    drafted, accepted = (sum(one["timings"][name] for one in answers) for name in ("draft_n", "draft_n_accepted"))
    assert 0.1 < accepted / drafted < 1
