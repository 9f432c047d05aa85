"""Loading causal language models, and cutting them between hidden states and logits.

Logits `[B, T, V]` are the largest thing in distillation. Cut before the head, a model gives hidden
states, and whoever needs logits makes those of a few rows at a time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xtk.errors import Damaged, XtkError
from xtk.models.head import Head
from xtk.tokens.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = 1e-3
# Arguments of `from_pretrained` that say where weights go.
PLACES = frozenset({"device_map", "max_memory", "offload_folder", "distributed_config"})


def quieten_transformers() -> None:
    """Silence transformers' advice and progress bars; its errors stay."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_causal_lm(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a model from a local folder.

    Args:
        folder: configuration and safetensors.
        dtype: of its weights.
        device: where it goes; the CPU if left out. Where `options` say where, it stays there.
        trust_remote_code: run the model's own Python code, which the user has to ask for.
        adapter: a folder of peft's, of an adapter of this model, which is merged into its weights (or stands beside
            them, where these are quantised).
        options: more arguments of `from_pretrained`.

    Raises:
        XtkError: there is no model, or its files are damaged, or it wants code of its own to be run.
    """
    import transformers

    quieten_transformers()
    if not (folder / "config.json").is_file():
        raise XtkError("there is no model in this folder (config.json)", where=str(folder))
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin"))
        raise XtkError(
            "this model's weights are pickles" if pickled else "there are no weights in this folder (*.safetensors)",
            where=str(folder),
            hint="save it again with save_pretrained, which writes safetensors" if pickled else None,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                **(options or {}),
            )
    except Exception as wrong:
        raise loading_error(folder, wrong) from wrong
    placed = PLACES.intersection(options or ()) or getattr(model, "quantization_method", None)
    if device is not None and not placed:
        model = model.to(device)
    return model if adapter is None else _with_adapter(model, adapter)


def _with_adapter(model: Any, adapter: Path) -> Any:
    """Put an adapter into a model.

    Raises:
        XtkError: peft is not there, the adapter's weights are not, or it belongs to another model.
    """
    if not any(adapter.glob("*.safetensors")):
        raise XtkError("there are no weights in this adapter (*.safetensors)", where=str(adapter))
    try:
        from peft import PeftModel
    except ImportError:
        raise XtkError("an adapter needs peft", where=str(adapter), hint="pip install 'xtk[peft]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if getattr(model, "quantization_method", None):
                model.load_adapter(str(adapter))
                return model
            return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except Exception as wrong:
        raise loading_error(adapter, wrong) from wrong


def loading_error(folder: Path, wrong: Exception) -> Exception:
    """Turn what transformers raises into what a user can act on; an error that is nobody's fault stays as it is."""
    text = " ".join(str(wrong).split())
    if "trust_remote_code" in text:
        return XtkError(
            "this model runs Python code of its own", where=str(folder), hint="--trust-remote-code, if you trust it"
        )
    if type(wrong).__name__ == "SafetensorError" or "safetensors" in text.lower():
        return Damaged(
            f"the weights cannot be read: {text}", where=str(folder), hint="copy or download the model again"
        )
    if isinstance(wrong, ValueError | OSError | KeyError | RuntimeError | TypeError):
        return XtkError(f"this model cannot be loaded: {text[:300]}", where=str(folder))
    return wrong


def context_length(configuration: Any) -> int | None:
    """Return the most tokens that a model was made to read; None if its configuration does not say."""
    configuration = configuration.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        value = getattr(configuration, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_rows(model: Any, tokenizer: Tokenizer) -> None:
    """Refuse a model that has no embedding row for a token of its tokenizer.

    Raises:
        XtkError: tells how many rows and tokens there are.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise XtkError(
            f"the model has {rows:,} vocabulary rows; its tokenizer names {len(tokenizer):,} tokens",
            where=str(tokenizer.name),
            hint="use the tokenizer that the model was trained with, or model.resize_token_embeddings(len(tokenizer))",
        )


class Cut(nn.Module):
    """A causal language model that gives hidden states, with its head apart.

    Whether `head(body(ids))` really gives the model's logits is tried once; where it does not, logits
    stand in for hidden states: right, and larger.

    Args:
        model: any causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._splits = self._can_be_split()

    @torch.no_grad()
    def _can_be_split(self) -> bool:
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if head is None or body is self.model or type(head) is not nn.Linear:
            return False
        if head.weight.device.type == "meta" or type(head.weight) is not nn.Parameter:  # offloaded, or sharded
            return False
        training = self.model.training
        self.model.eval()
        ids = torch.arange(1, 9, device=self.model.device).remainder(head.weight.shape[0])[None]
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        states = body(input_ids=ids, use_cache=False).last_hidden_state
        found = head(states.to(head.weight.device)).float().to(expected.device)
        self.model.train(training)
        scale = expected.abs().max().clamp_min(1)
        return expected.shape == found.shape and bool((expected - found).abs().max() <= TOLERANCE * scale)

    @property
    def head(self) -> Head:
        """The head, as parameters."""
        if not self._splits:
            return Head(None, None)
        linear = self.model.get_output_embeddings()
        return Head(linear.weight, linear.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return hidden states [B, T, H] (or logits [B, T, V] where the head cannot be cut off).

        Args:
            input_ids: [B, T], padded on the right. What stands after a token never changes it, so no mask is needed.
        """
        if self._splits:
            states: Tensor = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            return states.to(self.model.get_output_embeddings().weight.device)
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits
