"""vLLM on a CPU: the environment it needs, a model it has kernels for, and its OpenAI-compatible server."""

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

MAX_LOGPROBS = 24
# Users do not need these: tests have a small machine, a small model and no compiler.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}
ENGINE = ["enforce_eager=true", f"kv_cache_memory_bytes={128 << 20}"]


def make_llama(
    folder: Path, *, context: int, vocab_size: int = 496, seed: int = 3, eos_scale: float = 1.0, tied: bool = False
) -> Path:
    """Write a small Llama with a head size that vLLM has kernels for, and a tokenizer that splits numbers into digits.

    `eos_scale` multiplies the eos token's row of the output head; `tied`: the embedding is the output head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small_inputs.make_teacher_tokenizer(folder)
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=context, bos_token_id=None, eos_token_id=1,
        initializer_range=0.15, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(configuration)
    with torch.no_grad():
        model.lm_head.weight[configuration.eos_token_id] *= eos_scale
    model.save_pretrained(folder)
    return folder


class Server:
    """`python -m vllm.entrypoints.openai.api_server` as a process, started as users start it."""

    def __init__(
        self, folder: Path, log: Path, *flags: str, port: int = 0, python: str = sys.executable, **environment: str
    ) -> None:
        with socket.socket() as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe_socket.bind(("127.0.0.1", port))
            port = probe_socket.getsockname()[1]
        self.port = port
        self.host = f"http://127.0.0.1:{port}"
        self.url = self.host + "/v1"
        self.log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(128 << 20), "--max-logprobs", str(MAX_LOGPROBS), *flags]
        with log.open("wb") as log_file:
            self.process = subprocess.Popen(
                command, env={**ENVIRONMENT, **environment}, stdout=log_file, stderr=log_file, start_new_session=True
            )

    def wait(self, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(URLError, OSError):
                urlopen(self.host + "/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise RuntimeError("the server did not start:\n" + self.log.read_text(errors="replace")[-3000:])

    def kill(self) -> None:
        """End the server and its child processes with SIGKILL."""
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # its child processes
            os.killpg(self.process.pid, 9)
        self.process.wait()
