"""Time of `build-projection llama3 qwen` relative to a lower bound.

The lower bound: reading both tokenizers, decoding both vocabularies once and encoding each with the other tokenizer.
Both are whole processes, one after the other, median of 5.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from measurement import real_data, report, run_process

LOWER_BOUND = """
import sys
from tokenizers import Tokenizer
sides = [Tokenizer.from_file(f"{folder}/tokenizer.json") for folder in sys.argv[1:3]]
ids = [[[token] for token in range(side.get_vocab_size())] for side in sides]
texts = [side.decode_batch(tokens, skip_special_tokens=False) for side, tokens in zip(sides, ids)]
for side, foreign in zip(sides, reversed(texts)):
    side.encode_batch_fast(foreign, add_special_tokens=False)
"""
REPEATS = 5
METHODS = ("exact", "first-token", "multitoken", "partition")


def main() -> None:
    """Measure and print."""
    paths = [str(real_data() / "tokenizers" / name) for name in ("llama3", "qwen")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, list[float]] = {"floor": []}
        peak_memory = 0.0
        for repeat in range(REPEATS + 1):
            for method in METHODS:
                out = str(Path(folder) / f"{method}-{repeat}")
                command = (sys.executable, "-m", "xtk", "build-projection", *paths, "--method", method, "-o", out)
                seconds, peak, _ = run_process(*command)
                peak_memory = max(peak_memory, peak)
                results.setdefault(method, []).append(seconds)
            results["floor"].append(run_process(sys.executable, "-c", LOWER_BOUND, *paths)[0])
        medians = {name: statistics.median(seconds[1:]) for name, seconds in results.items()}
        for method in METHODS:
            ratio = medians[method] / medians["floor"]
            result = f"{ratio:.2f} x ({medians[method]:.1f} s; floor {medians['floor']:.1f} s)"
            rows.append(
                (f"`build-projection llama3 qwen --method {method}`, whole process over its floor", result, "1.3 x")
            )
    rows.append(("its peak memory", f"{peak_memory:.2f} GiB", "1 GB"))
    report(__file__, rows)


if __name__ == "__main__":
    main()
