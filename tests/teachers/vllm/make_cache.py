"""Make a cache with vLLM in this process: TEACHER CORPUS OUT ENGINE-OPTION..."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from xtk.artifacts.corpus import Corpus
    from xtk.teachers.caching import cache_teacher
    from xtk.teachers.request import CacheRequest
    from xtk.teachers.vllm import engine_options
    from xtk.tokens.signal import Support

    teacher, corpus, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    options = {"engine": engine_options(sys.argv[4:])}
    request = CacheRequest(
        teacher, "teacher", Support("top-k", top_k=8), backend="vllm", shard_tokens=400, backend_options=options
    )
    cache_teacher(request, Corpus([corpus], {}), out)


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
