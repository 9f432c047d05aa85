"""Rewards: what a completion is worth, judged by a rule. `REWARDS` lists them.

A reward is called with `(completion, prompt, row)`: the text that the student wrote, the text before it, and the
fields of the row of data. It returns a number, best between 0 and 1, or nan where it cannot judge: the row lacks what
it needs.
"""

from __future__ import annotations

REWARDS = {
    "exact": "xtk.rewards.exact_answer:ExactReward",
    "boxed": "xtk.rewards.boxed_answer:BoxedReward",
    "regex": "xtk.rewards.regex_and_json:RegexReward",
    "json": "xtk.rewards.regex_and_json:JsonReward",
    "tests": "xtk.rewards.code_tests:CodeTestsReward",
}
