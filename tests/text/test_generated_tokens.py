"""Losses without a teacher are computed on exactly the tokens that the assistant generates, in 14 chat templates.

The expected tokens come from the text alone: the rendered conversation, the generation prompt of each turn, the text of
the stop tokens, and the offsets of transformers' tokenizer.
"""

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_families import FAMILIES, write_family
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.text.alignment import align_sequences, separate_added_spaces
from xtk.text.chat.conversation_tokens import MARKUP, REGIONS
from xtk.text.chat.regions import RegionWeights, token_regions
from xtk.text.document import Document
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

STOPS = {
    "llama3_1": ["<|eot_id|>"], "llama4": ["<|eom|>", "<|eot|>"], "mistral": ["</s>"], "gemma3": ["<end_of_turn>"],
    "phi3": ["<|end|>"], "deepseekv3": ["<｜end▁of▁sentence｜>"], "glm4moe": ["<|user|>", "<|observation|>"],
    "granite": ["<|end_of_text|>"], "gptoss": ["<|end|>", "<|call|>", "<|return|>"],
}  # fmt: skip
CHATML_STOP = ["<|im_end|>"]
WITHOUT_CALLS = {"gemma3", "phi3", "phi4"}
WITHOUT_BORDERS = {*WITHOUT_CALLS, "gptoss"}  # a special token follows each part


def call(name: str, **arguments) -> dict:
    return {"type": "function", "id": "a1b2c3d4e", "function": {"name": name, "arguments": arguments}}


def answer(content: str = "", reasoning: str = "", *calls: dict) -> dict:
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


QUESTION = {"role": "user", "content": "Weather in Paris?"}
THANKS = {"role": "user", "content": "Thanks"}
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": "sunny"}
WEATHER = call("get_weather", city="Paris", days=3, note='a\n"b" ü')
CASES = {
    "answer": [QUESTION, answer("Sunny in Paris.")],
    "answer that ends like markup": [QUESTION, answer("<b>It is</b>\n>")],
    "reasoning": [QUESTION, answer("Sunny.", "I need >")],
    "reasoning in the content": [QUESTION, answer("<think>\nI need it.\n</think>\n\nSunny.")],
    "call": [QUESTION, answer("", "", WEATHER)],
    "call that ends with braces": [QUESTION, answer("", "", call("get_weather", at={"city": {"name": "Paris"}}))],
    "call that ends with a number": [QUESTION, answer("", "", call("get_weather", days=3))],
    "call without arguments": [QUESTION, answer("", "", call("get_weather"))],
    "content and call": [QUESTION, answer("I call.\n", "", WEATHER)],
    "reasoning and call": [QUESTION, answer("", "I need the tool>", WEATHER)],
    "reasoning, content and call": [QUESTION, answer("I call.", "I need the tool.", WEATHER)],
    "two calls": [QUESTION, answer("", "", call("get_weather", city="Paris"), call("close", days=[1, 2]))],
    "turns": [QUESTION, answer("", "I need the tool.", WEATHER), RESULT, answer("Sunny.", "It is sunny."), THANKS,
              answer("Welcome.")],
    "turns with reasoning at the end": [QUESTION, answer("Sunny."), THANKS, answer("Welcome.", "Close?>")],
}  # fmt: skip


class Family:
    """A tokenizer of a family with its template, as xtk and as transformers read it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.xtk, self.transformers = name, Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        self.stops = STOPS.get(name, CHATML_STOP)

    def generated_tokens(self, messages: list[dict]) -> tuple[list[int], set[int]]:
        """Return the ids of a conversation, and the indices of the tokens that the assistant generates."""
        messages = list(Document.from_messages(messages).conversation.messages)
        template = self.xtk.chat_template
        text = template.render(messages)
        encoding = self.transformers(text, add_special_tokens=False, return_offsets_mapping=True)
        expected, place = set(), 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                place = self._after(text, messages, number, place)
                continue
            start = self._generation_start(text, messages, number, place)
            stop = place = self._generation_stop(text, messages, number, start)
            expected |= {
                index for index, (first, last) in enumerate(encoding["offset_mapping"]) if start <= first < last <= stop
            }
        return encoding["input_ids"], expected

    @staticmethod
    def _after(text: str, messages: list[dict], number: int, place: int) -> int:
        content = messages[number]["content"]
        return text.index(content, place) + len(content)

    def _generation_start(self, text: str, messages: list[dict], number: int, place: int) -> int:
        prompt = self.xtk.chat_template.render(messages[:number], add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The template writes earlier turns in another way, or writes a begin of reasoning in the prompt only.
        last_content = messages[number - 1]["content"]
        tail = prompt[prompt.rindex(last_content) + len(last_content) :]
        for written in (tail, tail.partition("<think>")[0]):
            if text.startswith(written, place):
                return place + len(written)
        raise AssertionError(f"no generation prompt {tail!r} in {text[place:]!r}")

    def _generation_stop(self, text: str, messages: list[dict], number: int, start: int) -> int:
        last = number == len(messages) - 1
        if last and self.name == "phi3":
            text = text.removesuffix("<|end|>")  # the template adds one to the whole text
        high = len(text) if last else text.index(messages[number + 1]["content"], start)
        ends = [text.rfind(stop, start, high) + len(stop) for stop in self.stops if text.rfind(stop, start, high) >= 0]
        if self.name == "glm4moe" and last:
            return high  # the stop token is the start of the next turn
        return max(ends)


def write_merging_family(name: str, folder: Path, *, marks_are_text: bool) -> Path:
    """Write a family whose tokens reach over every border of text: `}}\\n`, `>\\n\\n`, `": "`, `.\\n</`."""
    template = Tokenizer(write_family(name, folder / "words")).chat_template
    specials = re.compile("|".join(map(re.escape, FAMILIES[name].special)))
    texts = []
    for messages in CASES.values():
        with contextlib.suppress(XtkError):  # the template refuses the messages
            texts += specials.split(template.render(Document.from_messages(messages).conversation.messages))
    # Short pieces around each border, of one and of two characters on each side, are frequent, and so become tokens.
    pieces = [text[at : at + size] for text in texts for size in (2, 3, 4) for at in range(len(text) - size + 1)]
    merged = [piece for piece in pieces if re.search(r"[^\w\s][\s\S]*[^\w ]|\w[^\w ]", piece)]
    return write_family(name, folder, merged_texts=merged, vocabulary_size=900, without_added=marks_are_text)


FORMS = ["words", "merging", "merging, marks are text"]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folder, read = tmp_path_factory.mktemp("generated"), {}

    def get(name: str, form: str) -> Family:
        if (name, form) not in read:
            place = folder / form
            written = (
                write_family(name, place)
                if form == "words"
                else write_merging_family(name, place, marks_are_text="text" in form)
            )
            read[name, form] = Family(name, written)
        return read[name, form]

    return get


def assert_exactly_the_generated_tokens_have_a_loss(family: Family, messages: list[dict]) -> None:
    ids, expected = family.generated_tokens(messages)
    document = Document.from_messages(messages)
    (sequence,) = tokenize_documents(family.xtk, [document])
    assert sequence.ids.tolist() == ids
    found = set(sequence.loss_mask.nonzero()[0].tolist())
    texts = {index: family.transformers.decode(ids[index]) for index in expected ^ found}
    assert found == expected, (
        {index: texts[index] for index in sorted(expected - found)},
        {index: texts[index] for index in sorted(found - expected)},
    )
    regions = token_regions(document, sequence)
    default = RegionWeights().select(sequence, regions, with_template=True)
    assert set(default.loss_mask.nonzero()[0].tolist()) == expected
    chosen = [name for name in REGIONS if name != MARKUP]
    without_markup = RegionWeights(chosen).select(sequence, regions, with_template=True)
    assert set(without_markup.loss_mask.nonzero()[0].tolist()) == {
        index for index in expected if regions[index] != REGIONS.index(MARKUP)
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_generated_tokens_have_a_loss(families, name, form, case):
    messages = CASES[case]
    if name in WITHOUT_CALLS and any(message.get("tool_calls") for message in messages):
        pytest.skip("the template writes no calls")
    try:
        assert_exactly_the_generated_tokens_have_a_loss(families(name, form), messages)
    except XtkError:
        pytest.skip("the template refuses the messages")


TEXTS = st.text(alphabet='a}>{"\n. <é/', min_size=1, max_size=6).map(lambda text: f"x{text}")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe", "smollm3", "deepseekv3", "mistral"])
@given(
    content=TEXTS, reasoning=TEXTS, value=TEXTS | st.integers() | st.lists(TEXTS), key=TEXTS, with_call=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_any_texts_have_a_loss_on_exactly_the_generated_tokens(
    families, name, content, reasoning, value, key, with_call
):
    calls = [call("get_weather", **{key: value})] if with_call else []
    messages = [QUESTION, answer(content, reasoning, *calls), RESULT if calls else THANKS, answer(content[::-1])]
    assert_exactly_the_generated_tokens_have_a_loss(families(name, "merging"), messages)


@pytest.mark.slow
def test_qwen_trains_the_tokens_that_close_a_call_and_textual_reasoning(real_data, tmp_path):
    folder = write_family("qwen2_5", tmp_path)
    shutil.copy(real_data / "tokenizers" / "qwen" / "tokenizer.json", folder)
    family = Family("qwen2_5", folder)
    for messages in CASES.values():
        assert_exactly_the_generated_tokens_have_a_loss(family, messages)
    calling = Document.from_messages(CASES["call that ends with a number"])
    thinking = Document.from_messages(CASES["reasoning in the content"])
    for document, text, region in ((calling, "}}\n", "tool-call"), (thinking, ">\n\n", "reasoning-end")):
        (sequence,) = tokenize_documents(family.xtk, [document])
        token = sequence.ids.tolist().index(family.transformers.convert_tokens_to_ids(text.replace("\n", "Ċ")))
        assert sequence.loss_mask[token]
        assert REGIONS[token_regions(document, sequence)[token]] == region


def token_bytes(family: Family, sequence, start: int, stop: int) -> bytes:
    names = family.xtk.special_token_names
    return b"".join(
        names[token].encode() if token in names else family.xtk.vocabulary.bytes_of(token)
        for token in sequence.ids[start:stop].tolist()
    )


@pytest.mark.slow
@pytest.mark.parametrize("student_form", FORMS[1:])
@pytest.mark.parametrize(
    ("student_name", "teacher_name"),
    [(name, name) for name in FAMILIES] + [("qwen2_5", "qwen3"), ("qwen3", "smollm3"), ("llama3_1", "granite"),
     ("glm4moe", "qwen3_5_think"), ("mistral", "qwen3"), ("gptoss", "smollm3")],
)  # fmt: skip
def test_distillation_takes_tokens_at_the_end_of_a_part_only_if_all_of_their_bytes_are_equal(
    families, student_name, teacher_name, student_form
):
    student, teacher = families(student_name, student_form), families(teacher_name, "merging")
    borders, compared = 0, 0
    for messages in CASES.values():
        document = Document.from_messages(messages)
        try:
            (own,), (other,) = (tokenize_documents(side.xtk, [document]) for side in (student, teacher))
        except XtkError:
            continue
        spans = separate_added_spaces(align_sequences(own, other), own, other)
        ends = own.segment_end_tokens
        for a, b, c, d in spans[own.train_mask[spans[:, 1] - 1] & ~np.isin(spans[:, 0], ends)].tolist():
            texts = token_bytes(student, own, a, b), token_bytes(teacher, other, c, d)
            assert texts[0].lstrip(b" ") == texts[1].lstrip(b" ")
            assert other.train_mask[c:d].all()  # the teacher scores them
        borders += int(own.border_mask.sum())
        compared += int(own.border_mask[spans[:, 1] - 1].sum())
        if student_name == teacher_name and student_form == "merging":
            assert set(np.flatnonzero(own.border_mask)) <= set(spans[:, 1] - 1)
    assert (borders > 0) == (student_name not in WITHOUT_BORDERS)
    assert compared <= borders


def test_teacher_with_another_prompt_scores_tokens_at_the_end_of_a_part(families):
    family = families("qwen2_5", "merging")
    document = Document.from_messages(CASES["call that ends with a number"])
    prompted = document.with_teacher_prompt([{"role": "user", "content": "Weather in Paris? It needs a tool."}])
    (own,), ((_, other),) = tokenize_documents(family.xtk, [document]), teacher_views(family.xtk, [prompted])
    spans = align_sequences(own, other)
    borders = np.flatnonzero(own.border_mask).tolist()
    assert borders
    for border in borders:
        ((start, stop),) = spans[spans[:, 1] - 1 == border, 2:].tolist()
        assert token_bytes(family, other, start, stop).endswith(token_bytes(family, own, border, border + 1))
        assert other.train_mask[start:stop].all()


def write_model(tokenizer: Path, folder: Path) -> Path:
    shutil.copytree(tokenizer, folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(AutoTokenizer.from_pretrained(folder)), hidden_size=16, intermediate_size=16,
                         num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_cached_teacher_tokens_at_the_end_of_a_part_are_aligned_as_without_a_cache(run, families, tmp_path):
    family = families("qwen2_5", "merging")
    teacher = write_model(family.xtk.folder, tmp_path / "teacher")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CASES.values()))
    run("cache-teacher", teacher, data, "-o", tmp_path / "cache")
    num_compared = 0
    for stored in TeacherCache(tmp_path / "cache"):
        (sequence,) = tokenize_documents(family.xtk, [stored.document])
        spans = align_sequences(sequence, stored.tokens)
        assert spans.tolist() == align_sequences(sequence, sequence).tolist()
        num_compared += int(sequence.border_mask[spans[:, 1] - 1].sum())
    assert num_compared > 5


@pytest.mark.parametrize(
    ("name", "form", "mark"),
    [
        ("mistral", "words", "[/THINK]"),
        ("smollm3", "words", "</think>"),
        ("glm4moe", "merging, marks are text", "</think>"),
        ("gptoss", "words", "<|end|>"),
    ],
)
@pytest.mark.parametrize("reasoning", ["", "I need it."])
def test_end_of_reasoning_before_a_call_is_not_part_of_the_call(families, name, form, mark, reasoning):
    family = families(name, form)
    document = Document.from_messages([QUESTION, answer("", reasoning, WEATHER)])
    (sequence,) = tokenize_documents(family.xtk, [document])
    regions = token_regions(document, sequence)
    rendered = family.xtk.chat_template.render(document.conversation.messages).encode()
    if mark.encode() not in rendered or (name == "gptoss" and not reasoning):
        return  # the template writes no end of reasoning
    starts = np.array([len(token_bytes(family, sequence, 0, at)) for at in range(len(sequence))])
    stop = rendered.rindex(mark.encode()) + len(mark)
    is_mark = (starts >= stop - len(mark)) & (starts < stop)
    assert {REGIONS[region] for region in regions[is_mark]} == {"reasoning-end"}
    assert {REGIONS[region] for region in regions[(starts >= stop) & sequence.loss_mask]} == {
        "tool-call",
        "end-of-turn",
    } - (
        {"end-of-turn"} if name == "glm4moe" else set()  # its stop token is the start of the next turn
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3", "mistral", "glm4moe"])
def test_nothing_is_trained_that_reaches_over_the_end_of_a_truncated_completion(families, name, form):
    family = families(name, form)
    document = replace(Document.from_messages(CASES["call that ends with a number"]), is_complete=False)
    (sequence,) = tokenize_documents(family.xtk, [document])
    texts = [token_bytes(family, sequence, at, at + 1) for at in range(len(sequence))]
    trained = np.flatnonzero(sequence.loss_mask)
    part_stop = b"".join(texts).rindex(b"3") + 1
    assert len(b"".join(texts[: trained[-1] + 1])) <= part_stop + 1  # JSON closes the object after the number


def test_train_on_counts_a_token_at_a_border_as_the_region_in_which_it_begins(families):
    family = families("smollm3", "merging, marks are text")
    document = Document.from_messages(CASES["reasoning"])
    (sequence,) = tokenize_documents(family.xtk, [document])
    regions = token_regions(document, sequence)
    (border,) = (at for at in np.flatnonzero(sequence.border_mask) if REGIONS[regions[at]] == "reasoning")
    assert token_bytes(family, sequence, border, border + 1).endswith(b">\n")
    for name, is_trained in (("reasoning", True), ("reasoning-end", False)):
        selected = RegionWeights([name]).select(sequence, regions, with_template=True)
        assert selected.loss_mask[border] == is_trained
