"""llama.cpp's server from the package xllamacpp, and a GGUF file in single precision for it.

    python tests/pretrained/llama_cpp_server.py MODEL.gguf [--exact] [--draft DRAFT.gguf [--num-draft-tokens K]]

It prints its address and runs until it is killed. With `--exact`, keys, values and attention are in single precision;
with `--draft`, it generates by speculative decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def write_single_precision(source: Path, target: Path) -> Path:
    """Write a GGUF file with the tensors of another one in single precision; return its path."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value_type = field.types[0]
        item_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        value = 0 if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, value_type, sub_type=item_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@contextlib.contextmanager
def run_server(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """Run the server with a model; yield its URL."""
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, __file__, str(model), *flags], stdout=out, stderr=out)
    try:
        for _ in range(600):
            lines = log.read_text(errors="replace").splitlines()
            if found := [line for line in lines if line.startswith("http://")]:
                yield found[0] + "/v1"
                return
            assert process.poll() is None, log.read_text(errors="replace")
            time.sleep(0.1)
        raise AssertionError(log.read_text(errors="replace"))
    finally:
        process.kill()
        process.wait()


def main() -> None:
    import xllamacpp

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--draft", default="")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    args = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = args.model, ["teacher"]
    parameters.port, parameters.n_ctx, parameters.n_parallel, parameters.warmup = 0, 2048, 2, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    if args.exact:
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if args.draft:
        speculative = parameters.speculative
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        speculative.draft.mparams.path, speculative.draft.n_max = args.draft, args.num_draft_tokens
        speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = 1
        parameters.endpoint_metrics = True
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
