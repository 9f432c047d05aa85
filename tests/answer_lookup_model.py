"""A model that looks up the completion of a prompt in a table.

It is a real model folder with custom code, so that commands load it and generate with it as with any other model. For a
prompt that is not in the table it generates only the end token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import small_inputs
from safetensors.torch import save_file

from xtk.text.tokenizer import Tokenizer

CODE = """
import json
from pathlib import Path

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OracleConfig(PretrainedConfig):
    model_type = "oracle"


class Oracle(PreTrainedModel, GenerationMixin):
    config_class = OracleConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, 2)
        table = json.loads(Path(config.table).read_text())
        self.answers = {tuple(prompt): answer for prompt, answer in table}
        self.start = config.bos_token_id
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None, past_key_values=None, **more):
        if input_ids.shape[1] > 1 or not hasattr(self, "rows"):
            shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
            rows = [[t for t, kept in zip(*pair) if kept] for pair in zip(input_ids.tolist(), shown.tolist())]
            rows = [row[1:] if row[0] == self.start else row for row in rows]
            self.rows = [iter(self.answers.get(tuple(row), ())) for row in rows]
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for at, row in enumerate(self.rows):
            logits[at, -1, next(row, self.config.eos_token_id)] = 50.0
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
"""


def make_oracle(folder: Path, answers: Mapping[str, str], *, context: int = 4096) -> Path:
    """Write a model that completes these prompts with their answers, with or without a bos token before the prompt."""
    small_inputs.make_student_tokenizer(folder)
    tokenizer = Tokenizer(folder)
    table = [
        [prompt.ids.tolist(), [*answer.ids.tolist(), tokenizer.end_id]]
        for prompt, answer in zip(
            tokenizer.encode(list(answers)), tokenizer.encode(list(answers.values())), strict=True
        )
    ]
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "oracle.py").write_text(CODE)
    configuration = {
        "model_type": "oracle", "architectures": ["Oracle"], "vocab_size": tokenizer.embedding_rows, "hidden_size": 2,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "eos_token_id": tokenizer.end_id,
        "bos_token_id": tokenizer.start_ids[0],
        "max_position_embeddings": context, "table": str(folder / "table.json"),
        "auto_map": {"AutoConfig": "oracle.OracleConfig", "AutoModelForCausalLM": "oracle.Oracle"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(configuration))
    import torch

    save_file(
        {"embedding.weight": torch.zeros(tokenizer.embedding_rows, 2)}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
