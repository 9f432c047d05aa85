"""Texts of the real pairs: Python functions, Wikipedia articles, small tasks, and problems of HumanEval and GSM8K."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xtk.quickstart.python_docs_corpus import SMALL_FUNCTIONS_FILE, python_functions

MIN_CHARACTERS, MAX_CHARACTERS = 200, 1200
# Shares of the source files whose functions are the development and the test set.
DEVELOPMENT_SHARE, TEST_SHARE = 0.06, 0.06
ARTICLE_TITLE = re.compile(r"= [^=].* =")
ARTICLE_PARTS = {0: "dev", 1: "test", 2: "test"}  # of each eight articles; the others are for training
ANSWER_FORMAT = "Solve the problem step by step. End with a line #### and the number alone."


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write JSON lines; the file is complete or absent."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    temporary.rename(path)
    return path


Texts = dict[str, list[dict[str, Any]]]  # {name of a file: its documents: `text`, or the fields of a problem}


def write_texts(folder: Path, texts: Texts) -> None:
    """Write texts as JSON lines; files that exist must have the same ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in texts.items():
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            write_rows(path, rows)
        elif read_rows(path) != rows:
            raise SystemExit(f"{path}: has other texts than this command makes; remove the folder, or use another one")


def checksum(texts: Texts) -> str:
    """Return a checksum of all texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def make_texts(corpora: Path, *, train: int, held_out: int) -> Texts:
    """Return all texts but those that a teacher writes.

    Args:
        corpora: the folder `corpora` of XTK_DATA.
        train: documents of a training set.
        held_out: documents of a development or test set.
    """
    functions = code_parts()
    articles = article_parts(corpora)
    problems = list(human_eval(corpora))
    questions = [gsm8k_problem(row) for row in read_rows(corpora / "gsm8k_train.jsonl")]
    test_questions = [gsm8k_problem(row) for row in read_rows(corpora / "gsm8k_test.jsonl")]
    return {
        "code-train": _documents(functions["train"][:train]),
        "code-dev": _documents(functions["dev"][:held_out]),
        "code-test": _measured(functions["test"][:held_out]),
        "text-train": _documents(articles["train"][:train]),
        "text-dev": _documents(articles["dev"][:held_out]),
        "text-test": _measured(articles["test"][:held_out]),
        "humaneval": _measured([row["prompt"] + row["canonical_solution"] for row in problems][:held_out]),
        "wikitext": _measured(articles["test"][: held_out // 2]),
        "gsm8k": _measured([f"{row['question']}\n{row['solution']}" for row in test_questions[-held_out:]]),
        "humaneval-problems": problems,
        "small-functions-problems": list(small_functions()),
        "maths-prompts": questions,
        "maths-problems": test_questions,
    }


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


def article_parts(corpora: Path) -> dict[str, list[str]]:
    """Return sentences of WikiText-2 as plain text: train, dev and test.

    No article is in two of them. Each has the first text of each article, then the second of each, and so on.
    """
    articles = [
        list(plain_sentences(paragraphs))
        for name in ("valid", "test")
        for paragraphs in wikipedia_articles(corpora / f"wikitext2-{name}.txt")
    ]
    parts: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for at in range(max(map(len, articles))):
        for number, texts in enumerate(articles):
            if at < len(texts):
                parts[ARTICLE_PARTS.get(number % 8, "train")].append(texts[at])
    return parts


def wikipedia_articles(path: Path) -> list[list[str]]:
    """Return the paragraphs of each article of a file of WikiText."""
    articles: list[list[str]] = [[]]
    for line in map(str.strip, path.read_text(encoding="utf-8").splitlines()):
        if ARTICLE_TITLE.fullmatch(line):
            articles.append([])
        elif line and not line.startswith("="):
            articles[-1].append(line)
    return articles


def plain_sentences(paragraphs: Iterable[str]) -> Iterator[str]:
    """Yield adjacent sentences of a paragraph that have no `<unk>`, without WikiText's separation of tokens.

    Yields:
        Texts of 200 to 1,200 characters: `its crew of 1 @,@ 200 , he said` is `its crew of 1,200, he said`.
    """
    for paragraph in paragraphs:
        runs: list[list[str]] = [[]]
        for sentence in re.split(r"(?<= [.?!]) ", paragraph):
            if "<unk>" in sentence or sentence.count('"') % 2:
                runs.append([])
            else:
                runs[-1].append(sentence)
        for text in map(_join_tokens, map(" ".join, runs)):
            if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
                yield text


def _join_tokens(text: str) -> str:
    text = re.sub(r" @(.)@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?%)\]])", r"\1", text)
    text = re.sub(r"([(\[$£€]) ", r"\1", text)
    text = re.sub(r" (n?'(?:s|t|re|ve|ll|d|m)?)(?=[ .,;]|$)", r"\1", text)
    return re.sub(r'" ?([^"]*?) ?"', r'"\1"', text)


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; texts may have other line separators than a newline."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _documents(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def _measured(texts: list[str]) -> list[dict[str, Any]]:
    """Return documents whose first word is a prompt, which no model is measured on.

    A model with a start token predicts the first word, one without it does not. So all are measured on the same bytes.
    """
    first_words = [re.match(r"\s*\S+", text) for text in texts]
    ends = [word.end() if word else 0 for word in first_words]
    return [{"prompt": text[:end], "completion": text[end:]} for text, end in zip(texts, ends, strict=True)]


def whole_text(row: dict[str, Any]) -> str:
    """Return the text of a document that this module wrote."""
    return str(row["text"] if "text" in row else row["prompt"] + row["completion"])
