"""Data of a GPU session, from the text of Python's standard library: tokenizers of real size, and documents.

    python tests/gpu/standard_library_data.py FOLDER

Writes what the benchmarks read from `XTK_DATA`, so that a session needs neither files nor network: a student's
tokenizer with the splitting rule and vocabulary size of Llama 3, a teacher's with those of Qwen, and pieces of code as
long as GSM8K's problems. A finished folder is kept.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import small_inputs
from tokenizers import Tokenizer

DOCUMENTS = {"train": 7473, "test": 1319}  # as in GSM8K
MEDIAN_CHARACTERS, SIGMA = 480, 0.4  # of a document, log-normal
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}
MAX_TOKEN_CHARACTERS = 24
MARK = "finished"


def library_texts() -> list[str]:
    """Return the texts of the standard library's modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if NOT_LIBRARY.isdisjoint(path.relative_to(folder).parts))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths]


def with_vocabulary_size(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Return a tokenizer with joined pairs of its tokens added, which it never produces, up to a vocabulary size."""
    content = json.loads(tokenizer.to_str())
    vocabulary, rng = content["model"]["vocab"], random.Random(size)
    ordinary = [token for token in vocabulary if not token.startswith("<|")]
    while len(vocabulary) < size:
        joined = rng.choice(ordinary) + rng.choice(ordinary)
        if len(joined) <= MAX_TOKEN_CHARACTERS:
            vocabulary.setdefault(joined, len(vocabulary))
    return Tokenizer.from_str(json.dumps(content))


def write_tokenizers(folder: Path, texts: list[str]) -> None:
    """Write the tokenizers of both sides; they have the folder names of the tokenizers that they stand for."""
    special_tokens = ["<|begin_of_text|>", "<|end_of_text|>"]
    student = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 128_256, special_tokens, texts)
    small_inputs.save_tokenizer(
        with_vocabulary_size(student, 128_256), folder / "llama3", bos_token=special_tokens[0],
        eos_token=special_tokens[1],
    )  # fmt: skip
    special_tokens = ["<|endoftext|>", "<|im_end|>"]
    teacher = small_inputs.byte_level_tokenizer(small_inputs.TEACHER_SPLIT, 151_936, special_tokens, texts)
    small_inputs.save_tokenizer(
        with_vocabulary_size(teacher, 151_936), folder / "qwen", bos_token=None, eos_token=special_tokens[1],
        pad_token=special_tokens[0],
    )  # fmt: skip


def write_documents(folder: Path, texts: list[str]) -> None:
    """Write pieces of the texts with the keys of GSM8K, at random places, always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, text = random.Random(0), "\n".join(texts)
    for part, count in DOCUMENTS.items():
        lines = []
        for _ in range(count):
            length = int(rng.lognormvariate(0, SIGMA) * MEDIAN_CHARACTERS)
            start = rng.randrange(len(text) - length)
            piece = text[start : start + length]
            lines.append(json.dumps({"question": piece[: length // 2], "answer": piece[length // 2 :]}) + "\n")
        (folder / f"gsm8k_{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_data(folder: Path) -> None:
    """Write tokenizers and documents, unless the folder has them."""
    if (folder / MARK).exists():
        return
    texts = library_texts()
    write_tokenizers(folder / "tokenizers", texts)
    write_documents(folder / "corpora", texts)
    (folder / MARK).touch()


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
