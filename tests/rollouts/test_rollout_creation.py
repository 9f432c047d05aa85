"""Prompts, turns, rewards: what becomes a rollout, and which of its tokens are the student's."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_inputs
from scripted_generator import ScriptedWriter

from xtk.artifacts.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.rewards.reward_spec import WeightedRewards, parse_reward
from xtk.rollouts.advantages import group_advantages
from xtk.rollouts.environments import load_environment
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import read_prompts, tokenize_between_turns, tokenize_prompts
from xtk.rollouts.rollout_generation import generate_rollouts
from xtk.rollouts.rollout_jsonl import json_line, number_line, rollout_to_json
from xtk.rollouts.rollout_record import Rollout
from xtk.tokens.document import Conversation
from xtk.tokens.teacher_tokenization import teacher_views
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator.py"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% if quick %}!{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(pair, tmp_path_factory):
    """The student's, with a chat template that begins answers."""
    folder = tmp_path_factory.mktemp("chatting")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pair.student / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def prompts_of(tmp_path, *records, columns=None):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(Corpus([str(path)], columns))


def spelled_out(tokenizer: Tokenizer, ids) -> str:
    names = tokenizer.special_token_names
    return "".join(
        names.get(token) or tokenizer.vocabulary.bytes_of(token).decode() for token in np.asarray(ids).tolist()
    )


def drawn_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    drawn = rollout.document.sampled_tokens
    return [spelled_out(tokenizer, drawn.ids[start:stop]) for start, stop in drawn.sampled_runs().tolist()]


def assert_read_back(tokenizer: Tokenizer, rollout: Rollout, prompt, tmp_path) -> None:
    """The line that is written is the document that was written, and students read it as it was drawn."""
    path = tmp_path / "line.jsonl"
    path.write_text(json_line(number_line(rollout_to_json(rollout, prompt, {}, "r"), 0, is_last=True)))
    (read,) = Corpus([str(path)])
    assert read.sampled_tokens == rollout.document.sampled_tokens
    assert [(part.text, part.train) for part in read.segments] == [
        (part.text, part.train) for part in rollout.document.segments
    ]
    assert read.is_complete == rollout.document.is_complete
    assert read.conversation == rollout.document.conversation
    (sequence,) = tokenize_documents(tokenizer, [read])
    assert np.array_equal(sequence.train_mask, rollout.document.sampled_tokens.sampled_mask)


def test_prompts_are_prompts_messages_before_the_last_answer_or_texts(tmp_path):
    talk = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    records = [
        {"prompt": "12 and", "completion": " 3", "answer": "15"},
        {"messages": talk, "tools": [{"name": "add"}], "teacher_prompt": "know: b"},
        {"messages": [*talk, {"role": "user", "content": "c?"}], "text": "not this"},
        {"prompt": talk[:1], "completion": talk[1:]},
        {"text": "the whole"},
    ]
    prompts = prompts_of(tmp_path, *records)
    assert [prompt.number for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [dict(prompt.record) for prompt in prompts] == records
    assert [[part.text for part in prompt.document.segments] for prompt in prompts] == [
        ["12 and"], ["a?"], ["a?", "b", "c?"], ["a?"], ["the whole"],
    ]  # fmt: skip
    assert not any(part.train for prompt in prompts for part in prompt.document.segments)
    assert prompts[1].document.teacher_prompt == "know: b"
    assert prompts[1].document.conversation.tools == ({"name": "add"},)
    (named,) = prompts_of(tmp_path, {"q": "Q", "text": "t", "w": 2.5}, columns={"prompt": "q", "weight": "w"})
    assert (named.document.text, named.document.weight) == ("Q", 2.5)
    with pytest.raises(XtkError, match="no column prompt, messages or text"):
        prompts_of(tmp_path, {"completion": "x"})
    with pytest.raises(XtkError, match="no message before the assistant"):
        prompts_of(tmp_path, {"messages": talk[1:]})


def test_a_prompt_is_read_behind_the_start_token_or_in_the_template_that_begins_an_answer(tokenizer, tmp_path):
    odd = "say <|end_of_text|>"
    prompts = prompts_of(tmp_path, {"prompt": odd}, {"messages": [{"role": "user", "content": odd}]})
    documents = [prompt.document for prompt in prompts]
    text, talk = tokenize_prompts(tokenizer, documents)
    assert spelled_out(tokenizer, text) == "<|begin_of_text|>" + odd
    assert spelled_out(tokenizer, talk) == f"<|begin_of_text|><|pad|>user\n{odd}<|end_of_text|>\n<|pad|>assistant\n"
    assert np.isin([text, talk][1], [tokenizer.end_id]).sum() == 1  # what is spelled in a content is text
    _, quick = tokenize_prompts(tokenizer, documents, {"quick": True})
    assert spelled_out(tokenizer, quick) == spelled_out(tokenizer, talk) + "!"


def test_rollouts_come_prompt_by_prompt_with_keys_ends_and_advantages_of_their_group(tokenizer, tmp_path):
    def says(read, key):
        return f" {key[2]} #### {1 if key[2] % 2 else key[1]}", key[2] != 2

    writer = ScriptedWriter(tokenizer, says, context=64)
    prompts = prompts_of(
        tmp_path,
        {"prompt": "one", "answer": "1"}, {"prompt": "long" * 90, "answer": "1"}, {"prompt": "two", "answer": "2"},
        {"prompt": "none"},
    )  # fmt: skip
    rollouts = generate_rollouts(
        prompts, writer, tokenizer, SamplingConfig(top_logprobs=2), num_generations=4, seed=9,
        rewards=WeightedRewards([parse_reward("exact:weight=2")]),
    )  # fmt: skip
    assert [(one.prompt, one.sample) for one in rollouts] == [(p, s) for p in (0, 2, 3) for s in range(4)]
    assert [ask.seed_key for ask in writer.asked] == [(9, p, s, 0) for p in (0, 2, 3) for s in range(4)]
    assert [one.document.text for one in rollouts[:2]] == ["one 0 #### 0", "one 1 #### 1"]
    assert [one.document.is_complete for one in rollouts[:4]] == [True, True, False, True]
    assert [one.finish_reason for one in rollouts[:4]] == ["stop", "stop", "length", "stop"]
    assert [one.reward for one in rollouts[:8]] == [0, 2, 0, 2, 2, 0, 2, 0]
    assert all(math.isnan(one.reward) for one in rollouts[8:])
    half = 1 / (math.sqrt(4 / 3) + 1e-4)  # rewards 0, 2, 0, 2: deviation of a sample sqrt(4 / 3)
    np.testing.assert_allclose(
        [one.document.sampled_tokens.advantage for one in rollouts[:4]], [-half, half, -half, half]
    )
    assert [one.document.sampled_tokens.advantage for one in rollouts[8:]] == [0] * 4
    drawn = rollouts[0].document.sampled_tokens
    assert drawn.logprobs[drawn.sampled_mask].tolist() == [
        -0.125 * n for n in range(1, int(drawn.sampled_mask.sum()) + 1)
    ]
    assert not drawn.logprobs[~drawn.sampled_mask].any()
    assert rollouts[0].top_ids[:, 0].tolist() == drawn.ids[drawn.sampled_mask].tolist()
    for one in rollouts:
        assert_read_back(tokenizer, one, prompts[one.prompt], tmp_path)


def test_advantages_leave_out_what_was_not_judged():
    assert group_advantages([1.0]).tolist() == [0]
    assert group_advantages([3.0, 3.0, 3.0]).tolist() == [0] * 3
    assert group_advantages([float("nan"), 1.0]).tolist() == [0] * 2
    assert group_advantages([0.0, float("nan"), 1.0], scale=False).tolist() == [-0.5, 0, 0.5]
    np.testing.assert_allclose(group_advantages([0.0, 3.0, 6.0]), np.array([-3, 0, 3]) / (3 + 1e-4))


def test_a_calculator_goes_on_with_a_text_and_only_what_the_student_drew_is_trained(tokenizer, tmp_path):
    def step_by_step(read, key):
        page = read.partition("clips.")[2]
        return {"": " 48/2 =", " 48/2 =": " <<48/2=", " 48/2 = <<48/2=24>>": "24 #### 24"}[page], page.endswith(">>")

    (prompt,) = prompts = prompts_of(tmp_path, {"prompt": "Half of 48 clips.", "answer": "#### 24"})
    writer = ScriptedWriter(tokenizer, step_by_step, context=256)
    (one,) = generate_rollouts(
        prompts, writer, tokenizer, SamplingConfig(stop=("=",)), num_generations=1, seed=0,
        rewards=WeightedRewards([parse_reward("exact")]), environment=load_environment(f"{CALCULATOR}:Calculator"),
    )  # fmt: skip
    assert [(part.role, part.text, part.train) for part in one.document.segments] == [
        ("prompt", "Half of 48 clips.", False),
        ("completion", " 48/2 = <<48/2=", True),
        ("tool", "24>>", False),
        ("completion", "24 #### 24", True),
    ]
    assert drawn_texts(tokenizer, one) == [" 48/2 = <<48/2=", "24 #### 24<|end_of_text|>"]
    assert (one.num_turns, one.finish_reason, one.reward, one.document.is_complete) == (3, "stop", 1.0, True)
    assert [ask.seed_key[3] for ask in writer.asked] == [0, 1, 2]
    assert len(writer.asked[0].input_ids) + writer.asked[0].max_length == 256
    assert_read_back(tokenizer, one, prompt, tmp_path)


GAME = """
class Game:
    role = "user"
    def reset(self, record):
        self.left = record["turns"]
        return record.get("beginning")
    def step(self, text):
        self.said, self.left = text, self.left - 1
        return f"again <|end_of_text|> {self.left}", self.left == 0
    def reward(self):
        return float(len(self.said))

class Wrong(Game):
    def step(self, text):
        return text

class Broken(Game):
    def reset(self, record):
        return record["missing"]

class Little:
    pass
"""


def test_turns_of_a_conversation_stand_in_its_template(tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    game = load_environment(f"{tmp_path / 'game.py'}:Game")
    talk = [{"role": "user", "content": "go"}]
    prompts = prompts_of(tmp_path, {"messages": talk, "turns": 2}, {"messages": talk, "turns": 9, "beginning": "now"})
    writer = ScriptedWriter(tokenizer, lambda read, key: ("ab" * (key[3] + 1), key[1:] != (0, 0, 1)))
    first, second = generate_rollouts(
        prompts, writer, tokenizer, SamplingConfig(), num_generations=1, seed=0, environment=game, max_turns=3,
        template_arguments={"quick": True},
    )  # fmt: skip
    begin, turn, answer = (
        "<|begin_of_text|>",
        "<|pad|>assistant\n!",
        "<|pad|>user\nagain <|end_of_text|> {}<|end_of_text|>\n",
    )
    assert spelled_out(tokenizer, first.document.sampled_tokens.ids) == (
        f"{begin}<|pad|>user\ngo<|end_of_text|>\n{turn}ab<|end_of_text|>\n{answer.format(1)}{turn}abab"
    )
    assert spelled_out(tokenizer, second.document.sampled_tokens.ids) == (
        f"{begin}<|pad|>user\ngo<|end_of_text|>\n<|pad|>user\nnow<|end_of_text|>\n{turn}ab<|end_of_text|>\n"
        f"{answer.format(8)}{turn}abab<|end_of_text|>\n{answer.format(7)}{turn}ababab<|end_of_text|>"
    )
    ends = [int((one.document.sampled_tokens.ids == tokenizer.end_id).sum()) for one in (first, second)]
    assert ends == [3, 7]  # those of the template and of the student, none that is spelled in an answer
    assert drawn_texts(tokenizer, first) == ["ab<|end_of_text|>", "abab"]
    assert (first.num_turns, first.finish_reason, first.reward, first.rewards) == (
        2,
        "length",
        4.0,
        {"environment": 4.0},
    )
    assert (second.num_turns, second.finish_reason, second.reward) == (3, "turns", 6.0)
    for one in (first, second):
        assert_read_back(tokenizer, one, prompts[one.prompt], tmp_path)


def test_turns_end_where_the_context_or_the_length_does(tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    prompts = prompts_of(tmp_path, {"prompt": "go", "turns": 9})

    def written(context, length):
        writer = ScriptedWriter(tokenizer, lambda read, key: (" abc.", False), context)
        sampling = SamplingConfig(stop=(".",), max_completion_length=length)
        (one,) = generate_rollouts(
            prompts, writer, tokenizer, sampling, num_generations=1, seed=0,
            environment=load_environment(f"{tmp_path / 'game.py'}:Game"), max_turns=4,
        )  # fmt: skip
        return one

    free = written(None, 100)
    assert (free.num_turns, free.finish_reason) == (4, "turns")
    sizes = np.diff(free.document.sampled_tokens.sampled_runs()).ravel()
    for context, length in (
        (int(free.document.sampled_tokens.sampled_runs()[2, 0]), 100),
        (None, int(sizes[:2].sum())),
    ):
        short = written(context, length)
        assert (short.num_turns, short.finish_reason) == (2, "length")
        assert (
            short.document.sampled_tokens.ids.tolist()
            == free.document.sampled_tokens.ids[: len(short.document.sampled_tokens.ids)].tolist()
        )
        assert len(short.document.sampled_tokens.sampled_runs()) == 2


def test_environments_that_are_none_are_told(tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    for name, message in (("Nothing", "no class in"), ("Little", "no method reset and no method step")):
        with pytest.raises(XtkError, match=message):
            load_environment(f"{tmp_path / 'game.py'}:{name}")
    prompts = prompts_of(tmp_path, {"prompt": "go", "turns": 9})
    for name, message in (("Wrong", "step of the environment returned"), ("Broken", "reset of the environment failed")):
        game = load_environment(f"{tmp_path / 'game.py'}:{name}")
        writer = ScriptedWriter(tokenizer, lambda read, key: ("a", True))
        with pytest.raises(XtkError, match=message):
            generate_rollouts(prompts, writer, tokenizer, SamplingConfig(), num_generations=1, seed=0, environment=game)


def test_the_calculator_calculates_and_runs_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(CALCULATOR.parent))
    sys.modules.pop("calculator", None)
    from calculator import calculated

    for expression, value in (
        ("48/2", "24"), ("1,000 + 2*3", "1006"), ("-(2+3)*.5", "-2.5"), ("1/3", "0.3333"), ("2*-3", "-6"),
        ("1/0", "?"), ("2**9", "?"), ("__import__('os')", "?"), ("", "?"), ("(1", "?"), ("1 2", "?"), ("(" * 300, "?"),
        ("9" * 201, "?"), ("1.2.3", "?"),
    ):  # fmt: skip
        assert calculated(expression) == value, expression


class ReasoningWriter(ScriptedWriter):
    """Writes a draft, a special token, and an answer."""

    def _write(self, ask, sampling):
        found = super()._write(ask, sampling)
        number = next(one for one in self.tokenizer.special_token_names if one not in self.tokenizer.end_ids)
        (draft,) = self.tokenizer.encode(["a draft 3"])
        ids = np.array([*draft.ids.tolist(), number, *found.ids.tolist()], np.int32)
        return replace(found, ids=ids, logprobs=np.full(len(ids), -1.0, np.float32), top_ids=None)


def test_rewards_read_the_answer_after_special_tokens(tokenizer, tmp_path):
    prompts = prompts_of(tmp_path, {"prompt": "1 + 1 = ", "answer": "2"}, {"messages": [
        {"role": "user", "content": "1 + 1?"}], "answer": "2"})  # fmt: skip
    writer = ReasoningWriter(tokenizer, lambda read, key: ("it is 2", True))
    rewards = WeightedRewards([parse_reward("exact:last_number_fallback=true")])
    for rollout in generate_rollouts(
        prompts, writer, tokenizer, SamplingConfig(), rewards=rewards, num_generations=1, seed=0
    ):
        assert rollout.reward == 1.0
        assert rollout.document.segments[-1].text == "a draft 3"  # what is aligned


def test_the_white_space_before_an_end_token_is_not_written_again(tokenizer, tmp_path):
    """Llama 2 writes a space between an answer and its end token."""
    folder = shutil.copytree(tokenizer.folder, tmp_path / "spaced")
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|end_of_text|>", " <|end_of_text|>"))
    spaced = Tokenizer(folder)
    (tmp_path / "game.py").write_text(GAME)
    (one,) = generate_rollouts(
        prompts_of(tmp_path, {"messages": [{"role": "user", "content": "go"}], "turns": 2}),
        ScriptedWriter(spaced, lambda read, key: ("ab", True)), spaced, SamplingConfig(), num_generations=1, seed=0,
        environment=load_environment(f"{tmp_path / 'game.py'}:Game"), max_turns=2,
    )  # fmt: skip
    assert "assistant\nab<|end_of_text|>\n<|pad|>user\nagain" in spelled_out(spaced, one.document.sampled_tokens.ids)


@pytest.mark.parametrize(("prompt", "teacher_prompt"), [("Who?\nAnswer:", ""), ("", "Be brief.")])
def test_a_completion_has_its_spaces_whatever_its_teacher_reads_before(families, tmp_path, prompt, teacher_prompt):
    """A tokenizer that prepends a space to a text, but not to a completion of a prompt."""
    own = Tokenizer(families["metaspace"])
    (given,) = prompts_of(tmp_path, {"prompt": prompt, "teacher_prompt": teacher_prompt})
    (one,) = generate_rollouts([given], ScriptedWriter(own, lambda read, key: ("Bob did it", True)), own,
                               SamplingConfig(), num_generations=1, seed=0)  # fmt: skip
    for tokenizer in (own, Tokenizer(families["teacher"])):
        ((_, tokens),) = teacher_views(tokenizer, [one.document])
        assert tokens.train_mask.any()


def test_the_mark_of_a_tools_answer_is_written_unless_the_student_sampled_it(tmp_path):
    """GLM's models stop at the mark of the next turn; after their end token it has to follow."""
    specials = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    backend = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 320, specials, ["a b"])
    folder = small_inputs.save_tokenizer(backend, tmp_path / "glm", bos_token=specials[0], eos_token=specials[0])
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n"
        "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    own = Tokenizer(folder)
    asked = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    ids = {name: own.vocabulary.special_tokens[name] for name in specials}
    for end, text in (
        ("<|endoftext|>", "<|observation|>\n22"),
        ("<|observation|>", "\n22"),
        ("<|user|>", "<|observation|>\n22"),
    ):
        found = tokenize_between_turns(own, Conversation(asked), {"role": "tool", "content": "22"}, ids[end])
        assert spelled_out(own, found) == f"{text}<|assistant|>\n"
