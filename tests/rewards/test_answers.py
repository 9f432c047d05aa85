"""The rewards gsm8k, boxed, regex, json and user functions: hand-checked pairs, and all of GSM8K."""

import json
import math
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.rewards import REWARDS
from xtk.rewards.answer_parsing import last_boxed_content, parse_number
from xtk.rewards.boxed_answer import MathComparer
from xtk.rewards.reward_spec import RewardSpec, WeightedRewards, parse_reward

needs_data = pytest.mark.skipif("XTK_DATA" not in os.environ, reason="XTK_DATA names no folder with real data")

EQUAL_ANSWERS = [
    ("18", "18"), ("$18", "18.00"), ("18.", "18"), ("1,234", "1234"), ("$1,234,567.50", "1234567.5"), ("0.5", "1/2"),
    ("1 1/2", "1.5"), ("10%", "10"), ("10\\%", "10"), ("-3", "−3"), ("-$5", "-5"), ("5 apples", "5"), ("2e3", "2000"),
    (".5", "0.50"), ("**42**", "42"), ("\\$7", "7"), ("1/3", "2/6"), ("60 miles per hour", "60"), ("Paris.", "paris"),
    ("5 million", "5,000,000"), ("3.5\\text{ million}", "3500000"), ("10\\,000", "10000"), ("12{,}000", "12000"),
    ("x = 18", "18"), ("2 hundred thousand", "200000"), ("18 km/h", "18"), ("60 eggs/day", "60"), ("\\boxed{18}", "18"),
    ("1,000,000", "1000000.0"), ("+4", "4"), ("007", "7"), ("\\frac{1}{2}", "0.5"), ("\\frac12", "1/2"), ("18€", "18"),
]  # fmt: skip
DIFFERENT_ANSWERS = [
    ("18", "19"), ("1,234", "1.234"), ("0.5", "1/3"), ("10%", "0.1"), ("3", "-3"), ("", "18"), ("18 or 19", "18"),
    ("Paris", "London"), ("1/0", "0"), ("12,34", "1234"), ("--3", "3"), ("0.333", "1/3"), ("eighteen", "18"),
    ("3x", "3"), ("3", "3x"), ("6i", "6"), ("2 pi", "2"), ("5 million", "5"), ("2 or x", "2"), ("5 to 6", "5"),
    ("1 2", "12"), ("18 + 1", "18"), ("nan", "18"), ("inf", "18"),
]  # fmt: skip


def score(spec, completion, row, prompt=""):
    return WeightedRewards([parse_reward(spec)])(completion, prompt, row)[0]


@pytest.mark.parametrize(("answer", "reference"), EQUAL_ANSWERS)
def test_equal_answers_in_different_notation_score_one(answer, reference):
    assert score("gsm8k", f"So it is\n#### {answer}\n", {"answer": f"because\n#### {reference}"}) == 1
    assert score("boxed:compare=strings", f"So \\boxed{{{answer}}}.", {"answer": f"#### {reference}"}) == 1


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT_ANSWERS)
def test_different_answers_score_zero(answer, reference):
    assert score("gsm8k", f"So it is\n#### {answer}\n", {"answer": reference}) == 0
    assert score("boxed:compare=strings", f"So \\boxed{{{answer}}}.", {"answer": reference}) == 0


def test_answers_are_extracted_from_completions_and_columns():
    row = {"answer": "#### 18"}
    assert score("gsm8k", "the answer is 18", row) == 0
    assert score("gsm8k:last_number_fallback=true", "it costs 3, so the answer is $18.", row) == 1
    assert score("gsm8k", "#### 3\n#### 18 dollars\n", row) == 1
    assert score("gsm8k:column=gold", "#### 5", {"gold": 5}) == 1
    assert math.isnan(score("gsm8k", "#### 5", {}))
    assert math.isnan(score("boxed:compare=strings", "\\boxed{5}", {"answer": None}))
    assert last_boxed_content(r"\boxed{1} then \fbox{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed_content(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed_content(r"$\boxed 7$") == "7"
    assert last_boxed_content(r"\boxed{12} and \boxed{3") == "12"
    assert last_boxed_content("no box") is None
    assert parse_number("1" * 1000) is None


def test_remarks_in_brackets_are_ignored_and_factors_are_not():
    assert score("gsm8k", "#### 18 (eighteen)", {"answer": "18"}) == 1
    for answer, reference in (("2(x-7)", "2(x+1)"), ("3(4)", "3"), ("y=3", "x=3"), ("2(x+1)", "2")):
        for reward in ("boxed", "boxed:compare=strings"):
            assert score(reward, f"\\boxed{{{answer}}}", {"answer": f"\\boxed{{{reference}}}"}) == 0, (reward, answer)
    assert score("gsm8k", "#### 2 hundred thousand", {"answer": "200"}) == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("It is 3\n1/2", "1/2"),
     ("The answer is −5.", "-5"), ("It is .5 of it", "1/2"), ("1 1/2 cups", "3/2"), ("12{,}000 dollars", "12000"),
     ("3.2e4", "32000"), ("pages 5-10", "10"), ("x=-3", "-3"), ("(-3)", "-3"), ("In 2020.", "2020")],
)  # fmt: skip
def test_last_number_of_a_text_is_found(text, number):
    assert score("gsm8k:last_number_fallback=true", text, {"answer": number}) == 1


def test_letters_in_a_box_are_variables_and_words_are_words():
    for answer, reference, expected_score in (
        ("18kg", "18", 0), ("18\\text{kg}", "18", 1), ("18\\text{ m}", "18", 1), ("18 m", "18", 0),
        ("18 meters", "18", 1),
        ("AB", "BA", 0), ("\\text{even}", "\\text{odd}", 0), ("AB", "AB", 1), ("Monday", "\\text{Monday}", 1),
    ):  # fmt: skip
        assert (
            score("boxed:compare=strings", f"\\boxed{{{answer}}}", {"answer": f"\\boxed{{{reference}}}"})
            == expected_score
        )
        if "m" not in answer and answer != "18kg":  # math-verify parses kg as a unit
            assert score("boxed", f"\\boxed{{{answer}}}", {"answer": f"\\boxed{{{reference}}}"}) == expected_score
    assert last_boxed_content(r"\boxed{5\\} x") == "5\\\\"
    assert score("boxed", r"\boxed{2x}", {"answer": r"\boxed{2y}"}) == 0
    for answer, reference in (("3x", "3"), ("3", "3x"), ("6i", "6"), ("5n", "5"), ("2 pi", "2"), ("5 million", "5")):
        assert score("boxed", f"\\boxed{{{answer}}}", {"answer": f"\\boxed{{{reference}}}"}) == 0, answer
    assert score("boxed", r"\boxed{2 x}", {"answer": r"\boxed{x \cdot 2}"}) == 1
    multiline_answer = "\\boxed{\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}}"
    assert score("boxed", multiline_answer, {"answer": r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"}) == 1


def test_case_of_letters_in_a_box_is_ignored():
    pytest.importorskip("math_verify")
    for answer, reference in (
        ("b", "B"),
        ("NO", "No"),
        ("No solution", "no solution"),
        ("X + 1", "1 + x"),
        (r"\Delta", r"\delta"),
    ):
        assert score("boxed", f"\\boxed{{{answer}}}", {"answer": f"\\boxed{{{reference}}}"}) == 1, answer


def test_killed_math_process_is_restarted():
    comparer = MathComparer(20)
    assert comparer.equal("1/2", "0.5") == 1
    comparer._process.kill()
    comparer._process.wait()
    assert comparer.equal("1/2", "0.5") == 1


def test_duplicate_rewards_are_refused():
    with pytest.raises(XtkError, match="given twice"):
        WeightedRewards([parse_reward("gsm8k"), parse_reward("gsm8k")])


def test_long_answers_are_scored_in_limited_time():
    started = time.monotonic()
    for text in ("1," * 50_000, "(" * 100_000, "1 " * 50_000, "\\boxed{" * 20_000, "a " * 50_000):
        assert score("gsm8k:last_number_fallback=true", "#### " + text, {"answer": "18"}) == 0
        assert score("boxed:compare=strings", "\\boxed{" + text + "}", {"answer": "18"}) == 0
    assert time.monotonic() - started < 20


@pytest.mark.slow
@needs_data
def test_every_reference_answer_of_gsm8k_scores_one():
    answers = [
        json.loads(line)["answer"]
        for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl")
        for line in Path(os.environ["XTK_DATA"], "corpora", name).read_text(encoding="utf-8").splitlines()
    ]
    rewards = WeightedRewards([parse_reward("gsm8k"), parse_reward("boxed:compare=strings,weight=2")])
    assert len(answers) == 8792
    for answer in answers:
        final = answer.rpartition("#### ")[2]
        assert rewards(f"{answer}\nThat is $\\boxed{{{final}}}$.", "", {"answer": answer})[0] == 3.0
        assert parse_number(final) is not None
        wrong = f"#### {parse_number(final) + 1}\n\\boxed{{{parse_number(final) + 1}}}"
        assert rewards(wrong, "", {"answer": answer})[0] == 0.0


def test_formulas_are_compared_mathematically():
    pytest.importorskip("math_verify")
    reward = parse_reward("boxed:seconds=10").load_reward()
    for answer, reference in [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"x^2+2x+1", r"(x+1)^2"), (r"\{1,2\}", r"\{2, 1\}"),
        (r"2\pi", r"\pi \cdot 2"), (r"\dfrac{3}{4}", "0.75"), (r"(1, 2)", r"\left(1,2\right)"),
    ]:  # fmt: skip
        assert reward(f"so $\\boxed{{{answer}}}$", "", {"answer": reference}) == 1, (answer, reference)
    for answer, reference in [(r"x^2+2x", r"(x+1)^2"), (r"(1,2)", r"(2,1)"), (r"\sqrt{3}", r"\sqrt{2}"), ("x", "5")]:
        assert reward(f"so $\\boxed{{{answer}}}$", "", {"answer": reference}) == 0, (answer, reference)


@pytest.mark.slow
def test_formula_comparison_stops_at_its_time_limit():
    pytest.importorskip("math_verify")
    reward = parse_reward("boxed:seconds=2").load_reward()
    assert reward(r"\boxed{x}", "", {"answer": "x"}) == 1
    assert reward(r"\boxed{\sqrt{4}}", "", {"answer": "2"}) == 1
    started = time.monotonic()
    assert reward(r"\boxed{9^{9^{9^{9}}} + x}", "", {"answer": r"8^{9^{9^{9}}} + x"}) == 0
    assert time.monotonic() - started < 15
    assert reward(r"\boxed{\sqrt{4}}", "", {"answer": "2"}) == 1


def test_regex_reward_matches_patterns_and_groups():
    spec = r"regex:group=it,pattern=^<think>.{1,9}</think>\s*<answer>(?P<it>\d+)</answer>$"
    completion = "<think>a\nb</think>\n<answer>18</answer>\n"
    assert parse_reward(spec).options == (("group", "it"), ("pattern", spec.partition("pattern=")[2]))
    assert score(spec, completion, {}) == 1
    assert score(spec, completion + "and more", {}) == 0
    assert score(spec.removesuffix("$"), completion + "and more", {}) == 1
    assert score(spec + ",column=gold", completion, {"gold": 18}) == 1
    assert score(spec + ",column=gold", completion, {"gold": 19}) == 0
    assert math.isnan(score(spec.replace("group=it", "group=1") + ",column=gold", completion, {}))


def test_json_reward_parses_and_validates_schemas(tmp_path):
    for text in ('{"a": 1}', " [1, 2]\n", "null", '```json\n{"a": 1}\n```'):
        assert score("json", text, {}) == 1
    for text in ("{'a': 1}", "{", "", "NaN", '{"a": 1} and more', "[" * 100_000):
        assert score("json", text, {}) == 0
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    assert score(f"json:schema={tmp_path}/s.json", '{"a": 1}', {}) == 1
    assert score(f"json:schema={tmp_path}/s.json", '{"a": "1"}', {}) == 0
    assert score("json:column=schema", '{"a": 1}', {"schema": json.dumps(schema)}) == 1
    assert score("json:column=schema", '{"b": 1}', {"schema": schema}) == 0
    assert math.isnan(score("json:column=schema", "{}", {}))
    assert math.isnan(score("json:column=schema", "{}", {"schema": {"type": "no such type"}}))


def test_numbers_beyond_the_range_of_floats_are_scored_against_a_schema():
    pytest.importorskip("jsonschema")
    row = {"schema": {"properties": {"a": {"multipleOf": 0.5}}}}
    for number, expected in (("1.5", 1), ("1" + 400 * "0", 0), ("1e999", 0), ("-1e999", 0)):
        assert score("json:column=schema", f'{{"a": {number}}}', row) == expected, number


def test_references_of_a_schema_that_lead_nowhere_are_not_scored_and_named_for_a_file(tmp_path):
    pytest.importorskip("jsonschema")
    for reference in ("#/definitions/missing", "#missing", "other.json", "urn:none"):
        schema = {"properties": {"a": {"$ref": reference}}}
        assert math.isnan(score("json:column=schema", '{"a": 1}', {"schema": schema})), reference
        (tmp_path / "s.json").write_text(json.dumps(schema))
        with pytest.raises(XtkError, match="does not lead to a schema") as raised:
            score(f"json:schema={tmp_path}/s.json", '{"a": 1}', {})
        assert reference.removeprefix("#") in raised.value.what
        assert str(tmp_path / "s.json") in raised.value.where
    to_a_string = {"type": "object", "properties": {"a": {"$ref": "#/type"}}}
    assert math.isnan(score("json:column=schema", '{"a": 1}', {"schema": to_a_string}))
    inner = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert score("json:column=schema", '{"a": 1}', {"schema": inner}) == 1
    assert score("json:column=schema", '{"a": "x"}', {"schema": inner}) == 0
    meta = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    assert score("json:column=schema", '{"type": "object"}', {"schema": meta}) == 1


def test_schemas_are_never_requested_from_the_network(tmp_path):
    pytest.importorskip("jsonschema")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        schema = {"properties": {"a": {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"}}}
        with ThreadPoolExecutor(1) as pool:
            scored = pool.submit(score, "json:column=schema", '{"a": 1}', {"schema": schema})
            with pytest.raises(TimeoutError):
                server.accept()[0].close()
            assert math.isnan(scored.result(10))


def test_fences_without_an_end_are_parsed_in_linear_time():
    started = time.process_time()
    for text in ("```" + "\n" * 50_000, "```json" + " \n" * 50_000 + "x", " \n" * 50_000 + "```" + "\n" * 50_000):
        assert score("json", text, {}) == 0
    assert time.process_time() - started < 5
    assert score("json", '```json \n\n\n{"a": 1}\n\n```\n\n', {}) == 1


def test_user_functions_are_scored_and_rewards_are_summed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def short(completion, prompt, row):\n    return None if not completion else len(completion) < row['most']\n"
        "def fails(completion, prompt, row):\n    return row['nothing']\n"
    )
    rewards = WeightedRewards([parse_reward(f"{file}:short:weight=0.5"), parse_reward("gsm8k")])
    total, values = rewards("#### 5", "", {"most": 10, "answer": 5})
    assert total == 1.5
    assert list(values) == [f"{file}:short:weight=0.5", "gsm8k"]
    assert rewards("#### 5", "", {"most": 10})[0] == 0.5
    assert math.isnan(rewards("", "", {"most": 10})[0])
    assert rewards.unscored == {"gsm8k": 2, f"{file}:short:weight=0.5": 1}
    with pytest.raises(XtkError, match="failed: KeyError"):
        score(f"{file}:fails", "x", {})
    with pytest.raises(XtkError, match="did you mean short"):
        score(f"{file}:shot", "x", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gsm8", "did you mean gsm8k"),
        ("gsm8k:colum=answer", "did you mean column"),
        ("gsm8k:weight=-1", "weight of the reward"),
        ("gsm8k:last_number_fallback=maybe", "last_number_fallback of the reward gsm8k"),
        ("regex", "needs a pattern"),
        ("regex:pattern=(", "not a valid Python regular expression"),
        ("regex:pattern=a,group=2", "no group '2'"),
        ("boxed:compare=letters", "is not a comparison"),
        ("json:schema=/no/such/file", "cannot be read"),
        ("/no/such/file.py:score", "the Python file does not exist"),
        ("tests:seconds=0", "must be above 0"),
    ],
)
def test_invalid_reward_specs_are_refused(text, message):
    with pytest.raises(XtkError, match=message):
        parse_reward(text).load_reward()


@pytest.mark.parametrize("name", REWARDS)
def test_reward_spec_round_trips_through_its_string(name):
    spec = RewardSpec(name, 0.25, (("pattern", "a,b=c"),) if name == "regex" else ())
    assert parse_reward(str(spec)) == spec
