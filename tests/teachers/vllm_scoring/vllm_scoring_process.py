"""Score documents with vLLM in this process and write the log-probabilities: FOLDER SUPPORT OUT ENGINE-OPTION...

With THEN_WAIT in the environment, the process then waits until it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

CONTEXT = 320


def main() -> None:
    import numpy as np
    from reference_logprobs import make_documents

    from xtk.cache.teacher_logprobs import StoredLogprobs, Support
    from xtk.engines.backend import parse_engine_options
    from xtk.models.resolver import ModelRef
    from xtk.teachers.backend_interface import TeacherConfig
    from xtk.teachers.vllm import VllmTeacher
    from xtk.text.tokenizer import Tokenizer

    folder, support, out = Path(sys.argv[1]), Support(**json.loads(sys.argv[2])), sys.argv[3]
    options = {"engine": parse_engine_options(sys.argv[4:]), "longest": CONTEXT}
    teacher = VllmTeacher(
        TeacherConfig(ModelRef(folder, name="teacher"), Tokenizer(folder), options=options, support=support)
    )
    assert (teacher.max_document_tokens, teacher.vocab_size) == (CONTEXT, 496)
    found = teacher.score(make_documents(folder, CONTEXT))
    arrays = {
        f"{at} {field.name}": getattr(one, field.name)
        for at, one in enumerate(found)
        for field in fields(StoredLogprobs)
    }
    np.savez(out, **arrays)
    if "THEN_WAIT" in os.environ:
        time.sleep(600)


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
