"""Headers of GGUF files, and their conversion to a Hugging Face model folder with the loader of transformers."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.errors import CorruptError, XtkError, require_package
from xtk.models.safetensors_headers import WeightMismatches
from xtk.models.saved_model import add_transformers_4_keys
from xtk.untrusted_json import parse_json

# llama.cpp (src/llama-vocab.cpp) splits digits before GPT-2's pattern in these; transformers 5 uses the pattern alone.
SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# Byte-level tokenizers with GPT-2's own pattern, in llama.cpp. Older files state none.
GPT2_PATTERN = frozenset({"", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling"})

# Tensors of the rotary embedding; a model computes them from its configuration.
_NO_WEIGHTS = re.compile(r"rope_freqs|rope_factors|attn_rot_embd")


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    architecture: str  # `general.architecture`, such as "llama"
    tokenizer: str  # `tokenizer.ggml.model`, such as "gpt2"; "" if the file has no tokenizer
    pre_tokenizer: str  # `tokenizer.ggml.pre`, such as "smollm"; "" if the file states none
    # The fields of `ARCHITECTURE.rope.scaling.`, such as {"type": "yarn", "factor": 4.0}.
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    tensor_sizes: dict[str, int] = field(default_factory=dict)  # {name: number of values} of all tensors


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file whose tensors are all inside of the file."""
    require_package("gguf", "reading a GGUF model needs", where=str(path))
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
        items = [item for item in reader.fields.items() if GGUFValueType.ARRAY not in item[1].types]
        fields = {name: stored.contents() for name, stored in items}
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as failure:
        raise CorruptError(
            f"this GGUF file is truncated or corrupt, or newer than the package gguf: {failure}",
            where=str(path),
            hint="download or copy the file again, or upgrade the package gguf",
        ) from None
    if (num_parts := int(fields.get("split.count", 1))) > 1:
        raise XtkError(
            f"this GGUF file is one of {num_parts} parts of a model",
            where=str(path),
            hint="merge the parts with llama.cpp: llama-gguf-split --merge FIRST_PART model.gguf",
        )
    names = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    texts = [str(fields.get(name, "")) for name in names]
    prefix = f"{texts[0]}.rope.scaling."
    scaling = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    if f"{texts[0]}.rope.scale_linear" in fields:  # in old files
        scaling = {"type": "linear", "factor": fields[f"{texts[0]}.rope.scale_linear"], **scaling}
    tensor_sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    return GgufHeader(texts[0], texts[1], texts[2], scaling, tensor_sizes)


def convert_gguf(path: Path, folder: Path) -> dict[str, Any] | None:
    """Write a GGUF model as config.json, safetensors, tokenizer and chat template into an existing folder.

    Weights are dequantized. They are stored in the narrowest of float16, bfloat16 and float32 that keeps every value.

    Returns:
        The scaling of its rotary embedding, as `rope_parameters` of transformers, where its loader left it out.
    """
    header = read_gguf_header(path)
    # The loader prints progress bars and warnings to stderr.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        config = _read_config(path, header)
        scaling = set_rope_scaling(path, header, config)
        model, mismatches = _read_model(path, header, config)
        tokenizer = _read_tokenizer(path, header)
    mismatches.check(path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_transformers_4_keys(folder)
    if header.tokenizer == "gpt2":
        _set_pre_tokenizer(folder / "tokenizer.json", header, path)
    return scaling


def _read_config(path: Path, header: GgufHeader) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    what = f"GGUF models of the architecture {header.architecture or 'unknown'}"
    with _loader_errors(path, what, "use the model's original folder or hub id, or a newer transformers"):
        return transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def set_rope_scaling(path: Path, header: GgufHeader, config: Any) -> dict[str, Any] | None:
    """Add the scaling of the rotary embedding to a configuration that lacks it, and return it."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # Gemma's local layers have separate frequencies, without a scaling
    if rope.get("rope_type", "default") != "default":  # the loader has read it
        return None
    scaling = rope_scaling(path, header, theta=float(rope.get("rope_theta", 10000.0)))
    rope.update(scaling or {})
    return scaling


def _read_model(path: Path, header: GgufHeader, config: Any) -> tuple[Any, WeightMismatches]:
    """Return the dequantized model, as a plain one that can be saved, and its weights that differ from the file's."""
    import torch
    import transformers

    for holder in (config, config.get_text_config()):
        for name in ("quantization_config", "_model_name_or_path"):
            holder.__dict__.pop(name, None)
    hint = "download the file again; or use the model's original folder or hub id"
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # without it, newer loaders keep the weights quantized
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _loader_errors(path, f"this GGUF model ({header.architecture})", hint):
        loaded, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            **options,
        )
    _check_all_weights_are_read(path, header, loaded)
    state = loaded.state_dict()
    dtype = _narrowest_dtype(state)
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    not_loaded = {name for name, weights in plain.named_parameters() if weights.is_meta}
    missing = {*loading_info["missing_keys"], *not_loaded}
    return plain, WeightMismatches.from_loading_info({**loading_info, "missing_keys": missing})


def _check_all_weights_are_read(path: Path, header: GgufHeader, model: Any) -> None:
    """Refuse a file with weights that the loader left out: it skips those whose names it does not know."""
    sizes = {name: size for name, size in header.tensor_sizes.items() if not _NO_WEIGHTS.search(name)}
    if model.config.get_text_config().tie_word_embeddings:
        sizes.pop("output.weight", None)
    state = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # tied ones once
    in_file, read = sum(sizes.values()), sum(state.values())
    if in_file > read:
        raise XtkError(
            f"transformers reads {read:,} of the {in_file:,} weights of this GGUF model ({header.architecture})",
            where=str(path),
            hint="use the model's original folder or hub id instead of the GGUF file",
        )


def _narrowest_dtype(state: dict[str, Any]) -> Any:
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in state.values()):
            return dtype
    return torch.float32


def _read_tokenizer(path: Path, header: GgufHeader) -> Any:
    import transformers

    what = f"the tokenizer of this GGUF model ({header.tokenizer or 'it has none'})"
    with _loader_errors(path, what, "use the model's original folder or hub id instead of the GGUF file"):
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _set_pre_tokenizer(path: Path, header: GgufHeader, source: Path) -> None:
    """Write the pre-tokenizer that llama.cpp uses where transformers does not know its name."""
    content = parse_json(path.read_text(encoding="utf-8"), what="tokenizer.json", where=str(path))
    known = content["pre_tokenizer"] or {}
    if known.get("type") != "ByteLevel" or header.pre_tokenizer in GPT2_PATTERN:
        return
    if header.pre_tokenizer not in SINGLE_DIGITS:
        terminal.note(
            f"warning: {source}: transformers does not know the pre-tokenizer {header.pre_tokenizer!r} of this GGUF "
            "model and uses GPT-2's; some texts may get other tokens than in training"
        )
        return
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, known]}
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


@contextlib.contextmanager
def _loader_errors(path: Path, what: str, hint: str) -> Iterator[None]:
    """Turn any error of transformers' loader into an `XtkError` with its first line."""
    try:
        yield
    except Exception as failure:
        line = next(iter(str(failure).splitlines()), type(failure).__name__)[:200]
        raise XtkError(f"transformers cannot read {what}: {line}", where=str(path), hint=hint) from failure


FREQUENCY_FACTORS = "rope_freqs.weight"  # what each frequency is divided by; llama.cpp's form of Llama 3's scaling
LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3's scaling: no public model has other values of these, and a file has only their result.
_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR = 1.0, 4.0
_ORIGINAL_CONTEXTS = tuple(2**power for power in range(11, 18))
_TOLERANCE = 1e-3


def rope_scaling(path: Path, header: GgufHeader, *, theta: float) -> dict[str, Any] | None:
    """Return the scaling of a GGUF model's rotary embedding as transformers' `rope_parameters`; None without any."""
    stated = header.rope_scaling
    kind = str(stated.get("type", "none"))
    factor = float(stated.get("factor", 1.0))
    if any(name in header.tensor_sizes for name in LONG_ROPE):
        raise _unknown(path, "longrope")
    if FREQUENCY_FACTORS in header.tensor_sizes:
        factors = _read_tensor(path, FREQUENCY_FACTORS)
        if not np.allclose(factors, 1.0):
            if kind != "none":
                raise _unknown(path, f"{kind} with a factor for each frequency")
            return _llama3(path, factors, theta)
    if kind == "none" or factor in (0.0, 1.0):  # 0: not scaled, as in llama.cpp
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    usual = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    if kind != "yarn" or any(not math.isclose(float(stated.get(name, value)), value) for name, value in usual.items()):
        raise _unknown(path, kind)
    if "original_context_length" not in stated:
        raise _unknown(path, "yarn without the original context length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(stated["original_context_length"]),
        "beta_fast": float(stated.get("yarn_beta_fast", 32.0)),
        "beta_slow": float(stated.get("yarn_beta_slow", 1.0)),
    }


def _llama3(path: Path, factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling that give these factors."""
    largest = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    for context in _ORIGINAL_CONTEXTS:
        parts = (context / wavelengths - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
        smooth = np.clip(parts, 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW_FREQUENCY_FACTOR,
                "high_freq_factor": _HIGH_FREQUENCY_FACTOR,
                "original_max_position_embeddings": context,
            }
    raise _unknown(path, "other factors of the frequencies than Llama 3's")


def _read_tensor(path: Path, name: str) -> np.ndarray:
    from gguf import GGUFReader, dequantize

    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float64).reshape(-1)


def _unknown(path: Path, what: str) -> XtkError:
    return XtkError(
        f"transformers cannot read this GGUF model's scaling of rotary positions ({what})",
        where=str(path),
        hint="use the model's original folder or hub id instead of the GGUF file",
    )
