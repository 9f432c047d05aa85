"""`xtk rollout`: rollouts of a student, scored by a teacher with another tokenizer and trained on, through pipes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from xtk_processes import run_here

from xtk.cache.reader import TeacherCache
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

XTK = f"{sys.executable} -m xtk"
USER_CODE = """
class Friend:
    def reset(self, record):
        return None
    def step(self, text):
        return " Bert, ", False
    def reward(self):
        return 0.5

def long(completion, prompt, row):
    return len(completion) if row["counted"] else None
"""
TEMPLATE = (
    "{% for message in messages %}<|pad|>{{ message.role }}\n{{ message.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    (folder / "own.py").write_text(USER_CODE)
    rows = [{"prompt": f"Anna has {number} apples and", "counted": number % 2, "id": number} for number in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def read_records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled_ids(record) -> list[int]:
    return np.array(record["student_ids"])[np.array(record["sampled_mask"]) == 1].tolist()


def assert_only_sampled_tokens_are_trained(cache, student, records):
    """Assert that the student trains exactly its sampled tokens, and that the teacher scores the same documents."""
    tokenizer, rows = Tokenizer(student), list(TeacherCache(cache))
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        (sequence,) = tokenize_documents(tokenizer, [row.document])
        assert sequence.ids.tolist() == record["student_ids"]
        assert sequence.ids[sequence.train_mask].tolist() == sampled_ids(record)
        np.testing.assert_array_equal(row.document.sampled_tokens.logprobs, np.float32(record["student_logprobs"]))
        assert row.document.sampled_tokens.advantage == record["advantage"]
        assert len(row.teacher_logprobs) == row.tokens.train_mask.sum()


@pytest.mark.long
@pytest.mark.slow
def test_rollouts_with_tools_are_scored_and_trained_on_through_pipes(pair, folder):
    line = (
        f"{XTK} rollout {pair.student} prompts.jsonl -o r.jsonl --num-generations 3 --max-completion-length 24 --stop a"
        " --environment own.py:Friend --max-turns 4 --reward own.py:long:weight=2 --seed 5"
        f" | {XTK} cache-teacher {pair.teacher} - --top-k 8 -o c"
        f" | {XTK} distill {pair.student} - --loss ce --max-steps 2 -o out --json"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == "out"
    assert "9 rollouts have no" in done.stderr
    assert "from tools" in done.stderr
    records = read_records(folder / "r.jsonl")
    assert [(record["prompt_number"], record["sample"]) for record in records] == [
        (prompt, sample) for prompt in range(6) for sample in range(3)
    ]
    assert {record["finish_reason"] for record in records} >= {"turns", "length"}
    multi_turn = [record for record in records if record["turns"] > 1]
    assert multi_turn
    for record in multi_turn:
        tool_texts = [part["text"] for part in record["segments"] if part["role"] == "tool"]
        assert tool_texts == [" Bert, "] * (record["turns"] - 1)
    for number in range(6):
        group = [record for record in records if record["prompt_number"] == number]
        assert abs(sum(record["advantage"] for record in group)) < 1e-9
        assert {record["counted"] for record in group} == {number % 2}
        assert all((record["rewards"]["own.py:long:weight=2.0"] is None) == (number % 2 == 0) for record in group)
    assert_only_sampled_tokens_are_trained(folder / "c", pair.student, records)


@pytest.mark.slow
def test_rollouts_are_deterministic_and_a_finished_file_is_reused(run, pair, folder, tmp_path):
    arguments = ("rollout", pair.student, folder / "prompts.jsonl", "--num-generations", 2, "--top-logprobs", 3,
                 "--max-completion-length", 12, "--batch-tokens", 200)  # fmt: skip
    done = run(*arguments, "-o", "r.jsonl", "--json", cwd=tmp_path)
    first = json.loads(done.stdout)
    assert {"path": "r.jsonl", "kind": "rollouts"}.items() <= first.items()
    before = (tmp_path / "r.jsonl").stat()
    content = (tmp_path / "r.jsonl").read_bytes()
    assert json.loads(run(*arguments, "-o", "r.jsonl", "--json", cwd=tmp_path).stdout) == first
    assert (tmp_path / "r.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    run(*arguments, "-o", "again.jsonl", cwd=tmp_path)
    assert (tmp_path / "again.jsonl").read_bytes() == content
    records = read_records(tmp_path / "r.jsonl")
    assert first["rollouts"] == len(records)
    assert f"left out {12 - len(records)} rollouts: empty" in done.stderr  # they begin inside of a character
    assert first["tokens"] == sum(len(sampled_ids(record)) for record in records)
    assert first["truncated_fraction"] == sum(record["finish_reason"] == "length" for record in records) / len(records)
    done_with_other_seed = run_here(*arguments, "--seed", 1, "-o", "r.jsonl", cwd=tmp_path, code=1)
    assert "rollouts that were made from other inputs" in done_with_other_seed.stderr
    assert (tmp_path / "r.jsonl").read_bytes() == content
    run(*arguments, "--seed", 1, "-o", "r.jsonl", "--force", cwd=tmp_path)
    other = read_records(tmp_path / "r.jsonl")
    assert [sampled_ids(record) for record in other] != [sampled_ids(record) for record in records]
    # A teacher with the student's tokenizer scores the student's most likely tokens.
    run("cache-teacher", pair.student, "again.jsonl", "--support", "candidates", "--precision", "float32", "-o", "c",
        cwd=tmp_path)  # fmt: skip
    assert_only_sampled_tokens_are_trained(tmp_path / "c", pair.student, records)
    for row, record in zip(TeacherCache(tmp_path / "c"), records, strict=True):
        np.testing.assert_allclose(
            row.teacher_logprobs.observed_logprobs,
            [logprob for logprob in record["student_logprobs"] if logprob],
            atol=1e-4,
        )
        assert all(len(ids) == 3 for ids in record["candidate_ids"])


@pytest.mark.slow
def test_conversations_are_rolled_out_and_invalid_options_are_refused(run, pair, folder, tmp_path):
    shutil.copytree(pair.student, tmp_path / "student")
    (tmp_path / "student" / "chat_template.jinja").write_text(TEMPLATE)
    conversation = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "No one knows."}]
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": conversation, "teacher_prompt": "It is 12.", "who": "solver"}) + "\n"
    )
    arguments = ("rollout", "student", "chat.jsonl", "--num-generations", 2, "--max-completion-length", 8)
    run(*arguments, "--route-column", "who", "-o", "r.jsonl", cwd=tmp_path)
    shutil.copytree(pair.teacher, tmp_path / "teacher")
    template = TEMPLATE.replace("<|pad|>", "<|endoftext|>").replace("<|end_of_text|>", "<|im_end|>")
    (tmp_path / "teacher" / "chat_template.jinja").write_text(template)
    run("cache-teacher", "teacher", "r.jsonl", "--route-column", "who", "--top-k", 4, "-o", "c", cwd=tmp_path)
    records = read_records(tmp_path / "r.jsonl")
    assert_only_sampled_tokens_are_trained(tmp_path / "c", tmp_path / "student", records)
    assert {row.document.teacher_name for row in TeacherCache(tmp_path / "c")} == {"solver"}
    for record in records:
        assert [(one["role"], one["train"]) for one in record["messages"]] == [("user", False), ("assistant", True)]
        assert record["teacher_prompt"] == "It is 12."
    (tmp_path / "sums.jsonl").write_text('{"a": 1, "prompt": "dropped"}\n')
    template_arguments = ("rollout", "student", "sums.jsonl", "--max-completion-length", 4, "-o", "sums-r.jsonl")
    run(*template_arguments, "--prompt-template", "{{a}} + {{a}} =", cwd=tmp_path)
    (record,) = read_records(tmp_path / "sums-r.jsonl")
    assert record["prompt"] == "1 + 1 ="
    assert record["a"] == 1
    done = run(*template_arguments, "--prompt-template", "{{a}} - {{a}} =", cwd=tmp_path, code=1)
    assert "rollouts that were made from other inputs" in done.stderr
    run(*template_arguments, "--prompt-template", "{{a}} - {{a}} =", "--apply-chat-template", "--force", cwd=tmp_path)
    (record,) = read_records(tmp_path / "sums-r.jsonl")
    assert record["messages"][0] == {"role": "user", "content": "1 - 1 =", "train": False}
    run("cache-teacher", "teacher", "sums-r.jsonl", "--top-k", 4, "-o", "sums-c", cwd=tmp_path)
    assert_only_sampled_tokens_are_trained(tmp_path / "sums-c", tmp_path / "student", [record])
    for options, message in (
        (("-o", "r.json"), "-o FILE.jsonl"),
        (("-o", "x.jsonl", "--prompt-template", "{{nothing}}"), "the prompt template cannot be rendered"),
        (("-o", "chat.jsonl", "--force"), "the output file is one of the input files"),
        (("-o", "x.jsonl", "--temperature", -1), "--temperature is -1"),
        (("-o", "x.jsonl", "--backend", "vlm"), "did you mean vllm?"),
        (("-o", "x.jsonl", "--chat-template-kwargs", "[1]"), "not a JSON object"),
        (("-o", "x.jsonl", "--environment", "nothing.py:A"), "the Python file does not exist"),
        (("-o", "x.jsonl", "--server", "http://localhost:1"), "--server needs --backend server"),
    ):
        done = run(*arguments, *options, cwd=tmp_path, code=1)
        assert message in done.stderr
        assert not (tmp_path / "x.jsonl").exists()
    assert read_records(tmp_path / "chat.jsonl")[0]["who"] == "solver"


def test_a_changed_schema_file_is_a_different_request(run, pair, folder, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    arguments = ("rollout", pair.student, folder / "prompts.jsonl", "--max-completion-length", 8,
                 "--reward", "json:schema=schema.json", "-o", "r.jsonl")  # fmt: skip
    run(*arguments, cwd=tmp_path)
    run(*arguments, cwd=tmp_path)
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    assert "made from other inputs" in run_here(*arguments, cwd=tmp_path, code=1).stderr


def test_unpaired_surrogates_in_other_columns_are_replaced(run, pair, tmp_path):
    row = r'{"prompt": "Anna has", "note": "\ud83d", "more": [{"\udc00": 1}], "k\ud83d": "\ud83d\ude00"}'
    (tmp_path / "prompts.jsonl").write_text(row + "\n")
    arguments = ("rollout", pair.student, "prompts.jsonl", "--max-completion-length", 4, "-o", "r.jsonl")
    run(*arguments, cwd=tmp_path)
    (record,) = read_records(tmp_path / "r.jsonl")
    assert record["note"] == "\ufffd"
    assert record["more"] == [{"\ufffd": 1}]
    assert record["k\ufffd"] == "\U0001f600"
    content = (tmp_path / "r.jsonl").read_bytes()
    run(*arguments, cwd=tmp_path)
    assert (tmp_path / "r.jsonl").read_bytes() == content
