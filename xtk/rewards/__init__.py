"""Rewards: rules that score a completion. `REWARDS` maps their names to their classes.

A reward is called as `reward(completion, prompt, row)`: the student's text, the text before it, and the fields of the
data row. It returns a number, usually between 0 and 1, or nan if it cannot score the completion because the row lacks
a field that it needs.
"""

from __future__ import annotations

REWARDS = {
    "gsm8k": "xtk.rewards.gsm8k_answer:Gsm8kReward",
    "boxed": "xtk.rewards.boxed_answer:BoxedReward",
    "regex": "xtk.rewards.regex_and_json:RegexReward",
    "json": "xtk.rewards.regex_and_json:JsonReward",
    "tests": "xtk.rewards.code_tests:CodeTestsReward",
}
