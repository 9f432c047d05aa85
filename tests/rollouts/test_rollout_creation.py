"""Creation of rollouts: prompts, environment turns, rewards, advantages, and the mask of sampled tokens."""

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
from scripted_generator import ScriptedGenerator

from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.rewards.reward_spec import WeightedRewards, parse_reward
from xtk.rollouts.environments import load_environment
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import read_prompts, tokenize_between_turns, tokenize_prompts
from xtk.rollouts.rollout_generation import generate_rollouts, group_advantages
from xtk.rollouts.rollout_jsonl import json_line, number_line, rollout_to_json
from xtk.rollouts.rollout_record import Rollout
from xtk.text.document import Conversation
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator.py"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% if quick %}!{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(pair, tmp_path_factory):
    """The student's tokenizer with a chat template that has a generation prompt."""
    folder = tmp_path_factory.mktemp("chatting")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pair.student / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def make_prompts(tmp_path, *records, columns=None):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(Corpus([str(path)], columns))


def decode(tokenizer: Tokenizer, ids) -> str:
    special_names = tokenizer.special_token_names
    return "".join(
        special_names.get(token) or tokenizer.vocabulary.bytes_of(token).decode() for token in np.asarray(ids).tolist()
    )


def sampled_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    sampled = rollout.document.sampled_tokens
    return [decode(tokenizer, sampled.ids[start:stop]) for start, stop in sampled.sampled_runs().tolist()]


def assert_round_trip(tokenizer: Tokenizer, rollout: Rollout, prompt, tmp_path) -> None:
    """Assert that the written JSONL line reads back as the same document and tokenizes to the sampled tokens."""
    path = tmp_path / "line.jsonl"
    path.write_text(json_line(number_line(rollout_to_json(rollout, prompt, {}, "r"), 0, is_last=True)))
    (document,) = Corpus([str(path)])
    assert document.sampled_tokens == rollout.document.sampled_tokens
    assert [(segment.text, segment.train) for segment in document.segments] == [
        (segment.text, segment.train) for segment in rollout.document.segments
    ]
    assert document.is_complete == rollout.document.is_complete
    assert document.conversation == rollout.document.conversation
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert np.array_equal(sequence.train_mask, rollout.document.sampled_tokens.sampled_mask)


def test_prompts_are_read_from_prompt_messages_or_text_columns(tmp_path):
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    records = [
        {"prompt": "12 and", "completion": " 3", "answer": "15"},
        {"messages": chat, "tools": [{"name": "add"}], "teacher_prompt": "know: b"},
        {"messages": [*chat, {"role": "user", "content": "c?"}], "text": "not this"},
        {"prompt": chat[:1], "completion": chat[1:]},
        {"text": "the whole"},
    ]
    prompts = make_prompts(tmp_path, *records)
    assert [prompt.number for prompt in prompts] == [0, 1, 2, 3, 4]
    assert [dict(prompt.record) for prompt in prompts] == records
    assert [[segment.text for segment in prompt.document.segments] for prompt in prompts] == [
        ["12 and"], ["a?"], ["a?", "b", "c?"], ["a?"], ["the whole"],
    ]  # fmt: skip
    assert not any(segment.train for prompt in prompts for segment in prompt.document.segments)
    assert prompts[1].document.teacher_prompt == "know: b"
    assert prompts[1].document.conversation.tools == ({"name": "add"},)
    (prompt_with_columns,) = make_prompts(
        tmp_path, {"q": "Q", "text": "t", "w": 2.5}, columns={"prompt": "q", "weight": "w"}
    )
    assert (prompt_with_columns.document.text, prompt_with_columns.document.weight) == ("Q", 2.5)
    with pytest.raises(XtkError, match="no column prompt, messages or text"):
        make_prompts(tmp_path, {"completion": "x"})
    with pytest.raises(XtkError, match="no message before the assistant"):
        make_prompts(tmp_path, {"messages": chat[1:]})


def test_prompts_begin_with_the_start_token_or_use_the_generation_template(tokenizer, tmp_path):
    special_text = "say <|end_of_text|>"
    prompts = make_prompts(
        tmp_path, {"prompt": special_text}, {"messages": [{"role": "user", "content": special_text}]}
    )
    documents = [prompt.document for prompt in prompts]
    text_ids, chat_ids = tokenize_prompts(tokenizer, documents)
    assert decode(tokenizer, text_ids) == "<|begin_of_text|>" + special_text
    assert (
        decode(tokenizer, chat_ids)
        == f"<|begin_of_text|><|pad|>user\n{special_text}<|end_of_text|>\n<|pad|>assistant\n"
    )
    assert np.isin(chat_ids, [tokenizer.end_id]).sum() == 1  # names in contents are text
    _, quick_ids = tokenize_prompts(tokenizer, documents, {"quick": True})
    assert decode(tokenizer, quick_ids) == decode(tokenizer, chat_ids) + "!"


def test_rollouts_are_ordered_by_prompt_with_seed_keys_rewards_and_group_advantages(tokenizer, tmp_path):
    def script(text, key):
        return f" {key[2]} #### {1 if key[2] % 2 else key[1]}", key[2] != 2

    generator = ScriptedGenerator(tokenizer, script, context=64)
    prompts = make_prompts(
        tmp_path,
        {"prompt": "one", "answer": "1"}, {"prompt": "long" * 90, "answer": "1"}, {"prompt": "two", "answer": "2"},
        {"prompt": "none"},
    )  # fmt: skip
    rollouts = generate_rollouts(
        prompts, generator, tokenizer, SamplingConfig(top_logprobs=2), num_generations=4, seed=9,
        rewards=WeightedRewards([parse_reward("gsm8k:weight=2")]),
    )  # fmt: skip
    assert [(rollout.prompt, rollout.sample) for rollout in rollouts] == [
        (prompt_index, sample) for prompt_index in (0, 2, 3) for sample in range(4)
    ]
    assert [request.seed_key for request in generator.requests] == [
        (9, prompt_index, sample, 0) for prompt_index in (0, 2, 3) for sample in range(4)
    ]
    assert [rollout.document.text for rollout in rollouts[:2]] == ["one 0 #### 0", "one 1 #### 1"]
    assert [rollout.document.is_complete for rollout in rollouts[:4]] == [True, True, False, True]
    assert [rollout.finish_reason for rollout in rollouts[:4]] == ["stop", "stop", "length", "stop"]
    assert [rollout.reward for rollout in rollouts[:8]] == [0, 2, 0, 2, 2, 0, 2, 0]
    assert all(math.isnan(rollout.reward) for rollout in rollouts[8:])
    expected_advantage = 1 / (math.sqrt(4 / 3) + 1e-4)  # rewards 0, 2, 0, 2: sample standard deviation sqrt(4 / 3)
    np.testing.assert_allclose(
        [rollout.document.sampled_tokens.advantage for rollout in rollouts[:4]],
        [-expected_advantage, expected_advantage, -expected_advantage, expected_advantage],
    )
    assert [rollout.document.sampled_tokens.advantage for rollout in rollouts[8:]] == [0] * 4
    sampled = rollouts[0].document.sampled_tokens
    assert sampled.logprobs[sampled.sampled_mask].tolist() == [
        -0.125 * position for position in range(1, int(sampled.sampled_mask.sum()) + 1)
    ]
    assert not sampled.logprobs[~sampled.sampled_mask].any()
    assert rollouts[0].top_ids[:, 0].tolist() == sampled.ids[sampled.sampled_mask].tolist()
    for rollout in rollouts:
        assert_round_trip(tokenizer, rollout, prompts[rollout.prompt], tmp_path)


def test_advantages_ignore_unscored_completions():
    assert group_advantages([1.0]).tolist() == [0]
    assert group_advantages([3.0, 3.0, 3.0]).tolist() == [0] * 3
    assert group_advantages([float("nan"), 1.0]).tolist() == [0] * 2
    assert group_advantages([0.0, float("nan"), 1.0], scale=False).tolist() == [-0.5, 0, 0.5]
    np.testing.assert_allclose(group_advantages([0.0, 3.0, 6.0]), np.array([-3, 0, 3]) / (3 + 1e-4))


def test_calculator_output_is_inserted_and_only_sampled_tokens_are_trained(tokenizer, tmp_path):
    def script(prefix, key):
        text = prefix.partition("clips.")[2]
        return {"": " 48/2 =", " 48/2 =": " <<48/2=", " 48/2 = <<48/2=24>>": "24 #### 24"}[text], text.endswith(">>")

    (prompt,) = prompts = make_prompts(tmp_path, {"prompt": "Half of 48 clips.", "answer": "#### 24"})
    generator = ScriptedGenerator(tokenizer, script, context=256)
    (rollout,) = generate_rollouts(
        prompts, generator, tokenizer, SamplingConfig(stop=("=",)), num_generations=1, seed=0,
        rewards=WeightedRewards([parse_reward("gsm8k")]), environment=load_environment(f"{CALCULATOR}:Calculator"),
    )  # fmt: skip
    assert [(segment.role, segment.text, segment.train) for segment in rollout.document.segments] == [
        ("prompt", "Half of 48 clips.", False),
        ("completion", " 48/2 = <<48/2=", True),
        ("tool", "24>>", False),
        ("completion", "24 #### 24", True),
    ]
    assert sampled_texts(tokenizer, rollout) == [" 48/2 = <<48/2=", "24 #### 24<|end_of_text|>"]
    assert (rollout.num_turns, rollout.finish_reason, rollout.reward, rollout.document.is_complete) == (
        3,
        "stop",
        1.0,
        True,
    )
    assert [request.seed_key[3] for request in generator.requests] == [0, 1, 2]
    assert len(generator.requests[0].input_ids) + generator.requests[0].max_length == 256
    assert_round_trip(tokenizer, rollout, prompt, tmp_path)


GAME = """
class Game:
    role = "user"
    def reset(self, record):
        self.left = record["turns"]
        return record.get("beginning")
    def step(self, text):
        self.text, self.left = text, self.left - 1
        return f"again <|end_of_text|> {self.left}", self.left == 0
    def reward(self):
        return float(len(self.text))

class Wrong(Game):
    def step(self, text):
        return text

class Broken(Game):
    def reset(self, record):
        return record["missing"]

class Little:
    pass
"""


def test_environment_turns_are_rendered_with_the_chat_template(tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    game = load_environment(f"{tmp_path / 'game.py'}:Game")
    chat = [{"role": "user", "content": "go"}]
    prompts = make_prompts(tmp_path, {"messages": chat, "turns": 2}, {"messages": chat, "turns": 9, "beginning": "now"})
    generator = ScriptedGenerator(tokenizer, lambda text, key: ("ab" * (key[3] + 1), key[1:] != (0, 0, 1)))
    first, second = generate_rollouts(
        prompts, generator, tokenizer, SamplingConfig(), num_generations=1, seed=0, environment=game, max_turns=3,
        template_arguments={"quick": True},
    )  # fmt: skip
    bos, assistant, user_turn = (
        "<|begin_of_text|>",
        "<|pad|>assistant\n!",
        "<|pad|>user\nagain <|end_of_text|> {}<|end_of_text|>\n",
    )
    assert decode(tokenizer, first.document.sampled_tokens.ids) == (
        f"{bos}<|pad|>user\ngo<|end_of_text|>\n{assistant}ab<|end_of_text|>\n{user_turn.format(1)}{assistant}abab"
    )
    assert decode(tokenizer, second.document.sampled_tokens.ids) == (
        f"{bos}<|pad|>user\ngo<|end_of_text|>\n<|pad|>user\nnow<|end_of_text|>\n{assistant}ab<|end_of_text|>\n"
        f"{user_turn.format(8)}{assistant}abab<|end_of_text|>\n{user_turn.format(7)}{assistant}ababab<|end_of_text|>"
    )
    end_counts = [int((rollout.document.sampled_tokens.ids == tokenizer.end_id).sum()) for rollout in (first, second)]
    assert end_counts == [3, 7]  # from the template and the student; none from text of the environment
    assert sampled_texts(tokenizer, first) == ["ab<|end_of_text|>", "abab"]
    assert (first.num_turns, first.finish_reason, first.reward, first.rewards) == (
        2,
        "length",
        4.0,
        {"environment": 4.0},
    )
    assert (second.num_turns, second.finish_reason, second.reward) == (3, "turns", 6.0)
    for rollout in (first, second):
        assert_round_trip(tokenizer, rollout, prompts[rollout.prompt], tmp_path)


def test_turns_stop_at_the_context_length_or_completion_length(tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    prompts = make_prompts(tmp_path, {"prompt": "go", "turns": 9})

    def generate(context, length):
        generator = ScriptedGenerator(tokenizer, lambda text, key: (" abc.", False), context)
        sampling = SamplingConfig(stop=(".",), max_completion_length=length)
        (rollout,) = generate_rollouts(
            prompts, generator, tokenizer, sampling, num_generations=1, seed=0,
            environment=load_environment(f"{tmp_path / 'game.py'}:Game"), max_turns=4,
        )  # fmt: skip
        return rollout

    unlimited = generate(None, 100)
    assert (unlimited.num_turns, unlimited.finish_reason) == (4, "turns")
    sizes = np.diff(unlimited.document.sampled_tokens.sampled_runs()).ravel()
    for context, length in (
        (int(unlimited.document.sampled_tokens.sampled_runs()[2, 0]), 100),
        (None, int(sizes[:2].sum())),
    ):
        limited = generate(context, length)
        assert (limited.num_turns, limited.finish_reason) == (2, "length")
        assert (
            limited.document.sampled_tokens.ids.tolist()
            == unlimited.document.sampled_tokens.ids[: len(limited.document.sampled_tokens.ids)].tolist()
        )
        assert len(limited.document.sampled_tokens.sampled_runs()) == 2


def test_invalid_environments_are_refused(tokenizer, tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    for name, message in (("Nothing", "no class in"), ("Little", "no method reset and no method step")):
        with pytest.raises(XtkError, match=message):
            load_environment(f"{tmp_path / 'game.py'}:{name}")
    prompts = make_prompts(tmp_path, {"prompt": "go", "turns": 9})
    for name, message in (("Wrong", "step of the environment returned"), ("Broken", "reset of the environment failed")):
        game = load_environment(f"{tmp_path / 'game.py'}:{name}")
        generator = ScriptedGenerator(tokenizer, lambda text, key: ("a", True))
        with pytest.raises(XtkError, match=message):
            generate_rollouts(
                prompts, generator, tokenizer, SamplingConfig(), num_generations=1, seed=0, environment=game
            )


def test_calculator_evaluates_arithmetic_and_does_not_execute_code(monkeypatch):
    monkeypatch.syspath_prepend(str(CALCULATOR.parent))
    sys.modules.pop("calculator", None)
    from calculator import calculated

    for expression, value in (
        ("48/2", "24"), ("1,000 + 2*3", "1006"), ("-(2+3)*.5", "-2.5"), ("1/3", "0.3333"), ("2*-3", "-6"),
        ("1/0", "?"), ("2**9", "?"), ("__import__('os')", "?"), ("", "?"), ("(1", "?"), ("1 2", "?"), ("(" * 300, "?"),
        ("9" * 201, "?"), ("1.2.3", "?"),
    ):  # fmt: skip
        assert calculated(expression) == value, expression


class ReasoningGenerator(ScriptedGenerator):
    """Generates a draft, a special token, and an answer."""

    def _complete(self, request, sampling):
        completion = super()._complete(request, sampling)
        special_id = next(token for token in self.tokenizer.special_token_names if token not in self.tokenizer.end_ids)
        (draft,) = self.tokenizer.encode(["a draft 3"])
        ids = np.array([*draft.ids.tolist(), special_id, *completion.ids.tolist()], np.int32)
        return replace(completion, ids=ids, logprobs=np.full(len(ids), -1.0, np.float32), top_ids=None)


def test_rewards_score_the_answer_after_special_tokens(tokenizer, tmp_path):
    prompts = make_prompts(tmp_path, {"prompt": "1 + 1 = ", "answer": "2"}, {"messages": [
        {"role": "user", "content": "1 + 1?"}], "answer": "2"})  # fmt: skip
    generator = ReasoningGenerator(tokenizer, lambda text, key: ("it is 2", True))
    rewards = WeightedRewards([parse_reward("gsm8k:last_number_fallback=true")])
    for rollout in generate_rollouts(
        prompts, generator, tokenizer, SamplingConfig(), rewards=rewards, num_generations=1, seed=0
    ):
        assert rollout.reward == 1.0
        assert rollout.document.segments[-1].text == "a draft 3"  # the part that is aligned


def test_whitespace_before_a_sampled_end_token_is_not_added_again(tokenizer, tmp_path):
    """Llama 2's template has a space between an answer and its end token."""
    folder = shutil.copytree(tokenizer.folder, tmp_path / "spaced")
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|end_of_text|>", " <|end_of_text|>"))
    spaced = Tokenizer(folder)
    (tmp_path / "game.py").write_text(GAME)
    (rollout,) = generate_rollouts(
        make_prompts(tmp_path, {"messages": [{"role": "user", "content": "go"}], "turns": 2}),
        ScriptedGenerator(spaced, lambda text, key: ("ab", True)), spaced, SamplingConfig(), num_generations=1, seed=0,
        environment=load_environment(f"{tmp_path / 'game.py'}:Game"), max_turns=2,
    )  # fmt: skip
    assert "assistant\nab<|end_of_text|>\n<|pad|>user\nagain" in decode(spaced, rollout.document.sampled_tokens.ids)


@pytest.mark.parametrize(("prompt", "teacher_prompt"), [("Who?\nAnswer:", ""), ("", "Be brief.")])
def test_completion_is_aligned_with_every_teacher_prompt(families, tmp_path, prompt, teacher_prompt):
    """A tokenizer that prepends a space to a text, but not to a completion of a prompt."""
    student = Tokenizer(families["metaspace"])
    (row,) = make_prompts(tmp_path, {"prompt": prompt, "teacher_prompt": teacher_prompt})
    (rollout,) = generate_rollouts([row], ScriptedGenerator(student, lambda text, key: ("Bob did it", True)), student,
                                   SamplingConfig(), num_generations=1, seed=0)  # fmt: skip
    for tokenizer in (student, Tokenizer(families["teacher"])):
        ((_, tokens),) = teacher_views(tokenizer, [rollout.document])
        assert tokens.train_mask.any()


def test_tool_role_token_is_added_unless_the_student_sampled_it(tmp_path):
    """GLM models stop at the role token of the next turn; after their end token the template has to add it."""
    specials = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    backend = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 320, specials, ["a b"])
    folder = small_inputs.save_tokenizer(backend, tmp_path / "glm", bos_token=specials[0], eos_token=specials[0])
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n"
        "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    glm_tokenizer = Tokenizer(folder)
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    ids = {name: glm_tokenizer.vocabulary.special_tokens[name] for name in specials}
    for sampled_end, text in (
        ("<|endoftext|>", "<|observation|>\n22"),
        ("<|observation|>", "\n22"),
        ("<|user|>", "<|observation|>\n22"),
    ):
        found = tokenize_between_turns(
            glm_tokenizer, Conversation(messages), {"role": "tool", "content": "22"}, ids[sampled_end]
        )
        assert decode(glm_tokenizer, found) == f"{text}<|assistant|>\n"
