"""Token ids in the configurations of a transplanted model, by role."""

from __future__ import annotations

from typing import Any

from xtk.models.saved_model import stop_token_ids
from xtk.transplant.token_sources import TokenSources

ROLES = ("bos", "eos", "pad")
# Settings of generation configurations with token ids, in addition to names that end in `_token_id`.
_OTHER_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "sequence_bias")


def set_token_ids(model: Any, sources: TokenSources) -> list[int]:
    """Set the ids of roles to those of the new tokenizer, and remove other old ids; return the end tokens.

    Generation ends at eos, at the end of a turn, and at the tokens where the model ended before, of those that the new
    tokenizer has. Other settings that are an old id get the new id of that token.
    """
    new = sources.new
    new_id = {old: token for token, old in enumerate(sources.copied_outputs.tolist()) if old >= 0}
    configurations = {id(part): part for part in (model.config, model.config.get_text_config())}
    # Configurations have default ids, which may be ordinary text tokens: keep only special tokens.
    old_stops = stop_token_ids(model) & sources.old.special_token_names.keys()
    stops = {token for token, old in enumerate(sources.copied.tolist()) if old in old_stops}
    ends = sorted(new.stop_ids | stops & new.special_token_names.keys())
    for part in (*configurations.values(), model.generation_config):
        for name in [name for name in vars(part) if name.endswith("_token_id")]:
            value = getattr(part, name)
            if value is not None:
                setattr(part, name, new_id.get(value) if isinstance(value, int) else None)
        for role in ROLES:
            setattr(part, f"{role}_token_id", new.special_token_ids.get(role))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    for name in _OTHER_IDS:
        if getattr(model.generation_config, name, None) is not None:
            setattr(model.generation_config, name, None)
    return ends
