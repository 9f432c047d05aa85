"""Start tokens: what a model reads before a text, by default as its own tokenizer in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Values of --start-token; any other one names a special token.
AUTO_START, NO_START = "auto", "none"
START_ROLES = ("bos", "eos")
# Special tokens that separate texts in pretraining; an instruct model's bos and eos often belong to its chat template.
TEXT_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
# Transformers 5 replaces this class's post-processor by one without a start token, whatever tokenizer.json has.
WITHOUT_POST_PROCESSOR = "GPTNeoXTokenizer"


def own_start_ids(backend: Any, configuration: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that the post-processor of the backend, of the library `tokenizers`, puts before a text.

    In transformers 5, tokenizer.json determines them, not `add_bos_token` of tokenizer_config.json.
    """
    is_replaced = str(configuration.get("tokenizer_class", "")).startswith(WITHOUT_POST_PROCESSOR)
    if is_replaced or backend.post_processor is None:
        return ()
    encoding = backend.encode("a")
    mask = encoding.special_tokens_mask
    return tuple(encoding.ids[: mask.index(0)]) if 0 in mask else ()


def start_post_processor(tokens: Sequence[str], ids: Sequence[int]) -> dict[str, Any]:
    """Return a post-processor, as in tokenizer.json, that puts special tokens before a text."""
    front = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    special = {
        token: {"id": token, "ids": [number], "tokens": [token]} for token, number in zip(tokens, ids, strict=True)
    }
    return {
        "type": "TemplateProcessing",
        "single": [*front, first],
        "pair": [*front, first, second],
        "special_tokens": special,
    }
