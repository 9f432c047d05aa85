"""Texts of the real pairs: Python functions, Wikipedia articles, small tasks, and problems of HumanEval and GSM8K."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xtk.quickstart.python_docs_corpus import SMALL_FUNCTIONS_FILE, python_functions

MIN_CHARACTERS, MAX_CHARACTERS = 200, 1200
# Shares of the source files whose functions are the development and the test set.
DEVELOPMENT_SHARE, TEST_SHARE = 0.06, 0.06
ANSWER_FORMAT = "Solve the problem step by step. End with a line #### and the number alone."


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write JSON lines; the file is complete or absent."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    temporary.rename(path)
    return path


def write_texts(folder: Path, corpora: Path, *, train: int, held_out: int) -> None:
    """Write all texts as JSON lines, with one document per line: `text`, or the fields of a problem.

    Args:
        corpora: the folder `corpora` of XTK_DATA.
        train: documents of a training set.
        held_out: documents of a development or test set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    functions = code_parts()
    articles = wikipedia_articles(corpora, "valid")
    problems = list(human_eval(corpora))
    questions = [gsm8k_problem(row) for row in _json_lines(corpora / "gsm8k_train.jsonl")]
    test_questions = [gsm8k_problem(row) for row in _json_lines(corpora / "gsm8k_test.jsonl")]
    wiki_test = wikipedia_articles(corpora, "test")
    texts = {
        "code-train": _documents(functions["train"][:train]),
        "code-dev": _documents(functions["dev"][:held_out]),
        "code-test": _documents(functions["test"][:held_out]),
        "text-train": _documents(articles[held_out : held_out + train]),
        "text-dev": _documents(articles[:held_out]),
        "text-test": _documents(wiki_test[:held_out]),
        "humaneval": _documents([row["prompt"] + row["canonical_solution"] for row in problems][:held_out]),
        "wikitext": _documents(wiki_test[-held_out // 2 :]),
        "gsm8k": _documents([f"{row['question']}\n{row['solution']}" for row in test_questions[-held_out:]]),
        "humaneval-problems": problems,
        "small-functions-problems": list(small_functions()),
        "maths-prompts": questions,
        "maths-problems": test_questions,
    }
    for name, rows in texts.items():
        if not (folder / f"{name}.jsonl").is_file():
            write_rows(folder / f"{name}.jsonl", rows)


def code_parts() -> dict[str, list[str]]:
    """Return the functions of the standard library, shuffled: train, dev and test.

    No source file is in two of them.
    """
    parts: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for source, text in python_functions():
        parts[_part(source)].append(text)
    for one in parts.values():
        random.Random(0).shuffle(one)
    return parts


def _part(source: str) -> str:
    fraction = int(hashlib.sha256(source.encode()).hexdigest()[:8], 16) / 2**32
    if fraction < TEST_SHARE:
        return "test"
    return "dev" if fraction < TEST_SHARE + DEVELOPMENT_SHARE else "train"


def wikipedia_articles(corpora: Path, name: str) -> list[str]:
    """Return the paragraphs of WikiText-2 of 200 to 1,200 characters, in their order."""
    lines = (corpora / f"wikitext2-{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if MIN_CHARACTERS <= len(line.strip()) <= MAX_CHARACTERS]


def human_eval(corpora: Path) -> Iterator[dict[str, Any]]:
    """Yield the problems of HumanEval."""
    with gzip.open(corpora / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def small_functions() -> Iterator[dict[str, Any]]:
    """Yield the tasks of `SMALL_FUNCTIONS_FILE` in the format of HumanEval.

    Yields:
        `prompt` (the function to the end of its description), `entry_point`, `canonical_solution` and `test`, the
            asserts that follow the function.
    """
    text = SMALL_FUNCTIONS_FILE.read_text(encoding="utf-8")
    lines, tasks = text.splitlines(keepends=True), []
    for node in ast.parse(text).body:
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef):
            body = "".join(lines[node.lineno - 1 : node.body[0].end_lineno])
            solution = source.removeprefix(body)
            tasks.append({"prompt": body, "entry_point": node.name, "canonical_solution": solution, "test": ""})
        elif isinstance(node, ast.Assert):
            tasks[-1]["test"] += source
    yield from tasks


def gsm8k_problem(row: dict[str, str]) -> dict[str, str]:
    """Return a problem of GSM8K with a prompt, and its last number as the answer."""
    prompt = f"{row['question']}\n\n{ANSWER_FORMAT}"
    answer = row["answer"].rpartition("####")[2].strip()
    return {"prompt": prompt, "question": row["question"], "solution": row["answer"], "answer": answer}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _documents(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]
