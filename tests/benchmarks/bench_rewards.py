"""Completions per second that the sandbox checks: HumanEval's solutions."""

from __future__ import annotations

import gzip
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

from measurement import DATA, machine

from xtk.rewards.reward_spec import parse_reward

COUNT = 60
AT_ONCE = 8


def main() -> None:
    """Print checks per second on one core: one after the other, and several at once."""
    text = gzip.decompress((DATA / "corpora" / "HumanEval.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in text.splitlines()][:COUNT]
    solutions = [(row["canonical_solution"], row["prompt"], row) for row in rows]
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    print(machine())
    print(f"load: {os.getloadavg()[0]:.1f}, niceness: {os.nice(0)}, on one core")
    for name in ("tests", "exact", "boxed:compare=strings"):
        reward = parse_reward(name).load_reward()
        row, answer = {"answer": "so\n#### 1,234"}, "because\n#### $1,234.00\n\\boxed{1234}"
        reward(rows[0]["canonical_solution"], rows[0]["prompt"], rows[0])
        started = time.perf_counter()
        if name == "tests":
            assert all(reward(*solution) == 1 for solution in solutions)
            print(f"| {name} | {len(rows) / (time.perf_counter() - started):,.0f} checks/s |")
            started, name = time.perf_counter(), f"{name}, {AT_ONCE} at once"
            with ThreadPoolExecutor(AT_ONCE) as pool:
                assert all(pool.map(reward, *zip(*solutions, strict=True)))
        else:
            assert all(reward(answer, "", row) == 1 for _ in rows)
        print(f"| {name} | {len(rows) / (time.perf_counter() - started):,.0f} checks/s |")


if __name__ == "__main__":
    main()
