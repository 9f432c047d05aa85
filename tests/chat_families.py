"""Small tokenizers with the chat templates of model families: TRL's, and hand-written ones for the others."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "Weather in Paris sunny tool I need the It is get_weather city days note Welcome Thanks call close"

# Sources of the formats: the tests of mistral-common's instruct tokenizers for Mistral, model cards for the others.
MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if message.role == "system" %}{{ "[SYSTEM_PROMPT]" + message.content + "[/SYSTEM_PROMPT]" }}
{%- elif message.role == "user" %}{{ "[INST]" + message.content + "[/INST]" }}
{%- elif message.role == "tool" %}
  {%- if message.tool_call_id|length != 9 %}{{ raise_exception("Tool call IDs must have length 9!") }}{% endif %}
  {{- '[TOOL_RESULTS]{"content": ' + message.content|tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
  {{- "[/TOOL_RESULTS]" }}
{%- elif message.role == "assistant" %}
  {%- if message.thinking %}{{ "[THINK]" + message.thinking + "[/THINK]" }}{% endif %}
  {{- message.content }}
  {%- if message.tool_calls %}{{ "[TOOL_CALLS][" }}
    {%- for call in message.tool_calls %}
      {%- if call.id|length != 9 %}{{ raise_exception("Tool call IDs must have length 9!") }}{% endif %}
      {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson }}
      {{- ', "id": "' + call.id + '"}' }}{{ ", " if not loop.last }}
    {%- endfor %}{{ "]" }}
  {%- endif %}{{ eos_token }}
{%- endif %}{% endfor %}"""

GRANITE = """{% for message in messages %}
{{- "<|start_of_role|>" + (message.role if message.role != "tool" else "tool_response") + "<|end_of_role|>" }}
{%- if message.tool_calls %}{{ "<|tool_call|>[" }}
  {%- for call in message.tool_calls %}
    {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson + "}" }}
    {{- ", " if not loop.last }}
  {%- endfor %}{{ "]" }}
{%- else %}{{ message.content }}{% endif %}{{ "<|end_of_text|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start_of_role|>assistant<|end_of_role|>" }}{% endif %}"""

SMOLLM3 = """{% for message in messages %}
{{- "<|im_start|>" + ("user" if message.role == "tool" else message.role) + "\\n" }}
{%- if message.role == "tool" %}{{ "<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- elif message.role == "assistant" %}
  {{- "<think>\\n" + (message.reasoning_content or "") + "\\n</think>\\n" + message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson }}
    {{- "}\\n</tool_call>" }}
  {%- endfor %}
{%- else %}{{ message.content }}{% endif %}{{ "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

PHI4 = """{% for message in messages %}{% if message.role != "tool" and not message.tool_calls %}
{{- "<|im_start|>" + message.role + "<|im_sep|>" + message.content + "<|im_end|>" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant<|im_sep|>" }}{% endif %}"""

LLAMA4 = """{{ bos_token }}{% for message in messages %}
{{- "<|header_start|>" + ("ipython" if message.role == "tool" else message.role) + "<|header_end|>\\n\\n" }}
{{- message.content|trim }}
{%- for call in message.tool_calls or [] %}
  {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments|tojson + "}" }}
{%- endfor %}{{ "<|eom|>" if message.tool_calls else "<|eot|>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|header_start|>assistant<|header_end|>\\n\\n" }}{% endif %}"""

CHATML, TOOL_TAGS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]
THINK_TAGS = ["<think>", "</think>"]


@dataclass(frozen=True)
class ChatFamily:
    """The chat template and the special tokens of a family.

    Attributes:
        template: the template; "": TRL's template of the family's name.
        bos, eos: the bos and eos token.
        special: special tokens.
        added: added tokens that are not special.
        calls_tools: whether the template accepts tool messages.
    """

    template: str
    bos: str | None
    eos: str
    special: list[str]
    added: list[str]
    calls_tools: bool = True


FAMILIES = {
    "llama3_1": ChatFamily("", "<|begin_of_text|>", "<|eot_id|>", [
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
        "<|python_tag|>"], []),
    "llama4": ChatFamily(LLAMA4, "<|begin_of_text|>", "<|eot|>", [
        "<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"], []),
    "qwen2_5": ChatFamily("", None, "<|im_end|>", CHATML, TOOL_TAGS),
    "qwen3": ChatFamily("", None, "<|im_end|>", CHATML, TOOL_TAGS + THINK_TAGS),
    "qwen3_5_think": ChatFamily("", None, "<|im_end|>", CHATML, TOOL_TAGS + THINK_TAGS),
    "mistral": ChatFamily(MISTRAL, "<s>", "</s>", [
        "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"], []),
    "gemma3": ChatFamily("", "<bos>", "<eos>", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], [],
        calls_tools=False),
    "phi3": ChatFamily("", "<s>", "<|end|>", [
        "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], []),
    "phi4": ChatFamily(PHI4, "<|endoftext|>", "<|im_end|>", [*CHATML, "<|im_sep|>"], []),
    "deepseekv3": ChatFamily("", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", [
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], [
        "<｜User｜>", "<｜Assistant｜>", *THINK_TAGS, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"]),
    "glm4moe": ChatFamily("", "[gMASK]", "<|endoftext|>", [
        "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"], [
        *THINK_TAGS, *TOOL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]),
    "smollm3": ChatFamily(SMOLLM3, None, "<|im_end|>", CHATML, THINK_TAGS + TOOL_TAGS),
    "granite": ChatFamily(GRANITE, "<|end_of_text|>", "<|end_of_text|>", [
        "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"], []),
    "gptoss": ChatFamily("", "<|startoftext|>", "<|return|>", [
        "<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
        "<|call|>"], []),
}  # fmt: skip


def write_family(
    name: str,
    folder: Path,
    *,
    vocabulary_size: int = 400,
    merged_texts: Sequence[str] = (),
    without_added: bool = False,
) -> Path:
    """Write a byte-level BPE tokenizer with the chat template and special tokens of a family; return its folder.

    Args:
        name: of the family.
        folder: the tokenizer is written into a folder in it.
        vocabulary_size: tokens without special and added ones.
        merged_texts: texts to train it on without splitting them, so that tokens reach over words, marks and lines.
        without_added: whether the tokens of the family that are not special are plain text.
    """
    family = FAMILIES[name]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    pattern = r"[\s\S]+" if merged_texts else r"[^\w\s]|\s?\w+|\s+"
    word_split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([word_split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Each family has another vocabulary size, so that their tokens differ.
    family_vocabulary_size = vocabulary_size - 8 * list(FAMILIES).index(name)
    trainer = trainers.BpeTrainer(vocab_size=family_vocabulary_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(merged_texts or [WORDS] * 30, trainer)
    tokenizer.add_special_tokens(family.special)
    added = [] if without_added else family.added
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos)
    templates = importlib.resources.files("trl") / "chat_templates"
    fast_tokenizer.chat_template = family.template or (templates / f"{name}.jinja").read_text()
    fast_tokenizer.save_pretrained(folder / name)
    return folder / name
