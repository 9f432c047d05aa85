"""vLLM itself, on a CPU: what it needs to run here, a model that it has kernels for, its OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import small_inputs

MOST = 24
# Not needed by users: a small machine, a small model, and no compiler.
SURROUNDINGS = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}
ENGINE = ["enforce_eager=true", f"kv_cache_memory_bytes={128 << 20}"]


def make_llama(
    folder: Path, *, context: int, rows: int = 496, seed: int = 3, ends: float = 1.0, tied: bool = False
) -> Path:
    """Write a small Llama with the width of heads that vLLM has kernels for, and single digits.

    Its head's row of the token that ends is `ends` times as large as others; `tied`: the embedding is the head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small_inputs.make_teacher_tokenizer(folder)
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=rows, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=context, bos_token_id=None, eos_token_id=1,
        initializer_range=0.15, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(configuration)
    with torch.no_grad():
        model.lm_head.weight[configuration.eos_token_id] *= ends
    model.save_pretrained(folder)
    return folder


class Server:
    """`python -m vllm.entrypoints.openai.api_server`, as users start it."""

    def __init__(
        self, folder: Path, log: Path, *flags: str, port: int = 0, python: str = sys.executable, **environment: str
    ) -> None:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            port = free.getsockname()[1]
        self.port = port
        self.host = f"http://127.0.0.1:{port}"
        self.url = self.host + "/v1"
        self.log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(128 << 20), "--max-logprobs", str(MOST), *flags]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env={**SURROUNDINGS, **environment}, stdout=out, stderr=out, start_new_session=True
            )

    def wait(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(URLError, OSError):
                urlopen(self.host + "/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise RuntimeError("the server did not start:\n" + self.log.read_text(errors="replace")[-3000:])

    def kill(self) -> None:
        """Take it down with all that it started, as the kernel would."""
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # what it started
            os.killpg(self.process.pid, 9)
        self.process.wait()
