"""Small real tokenizers of every supported family, each trained in a moment.

`MAKERS` maps the name of a family to the function that writes its tokenizer into a folder.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import small_inputs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Letters of the subword vocabularies, so that normalized odd text does not consist of unknown tokens only.
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?-=|'\"()[]<>_/#\u03a9\u03c9"
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _trained_byte_level(tokenizer: Tokenizer, vocabulary: int = 520) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*small_inputs.sentences(400, seed=2), *small_inputs.ODD_TEXTS], trainer)
    return tokenizer


def _save_byte_level(tokenizer: Tokenizer, folder: Path) -> Path:
    return small_inputs.save_tokenizer(tokenizer, folder, bos_token=None, eos_token="<|endoftext|>")


def make_gpt2(folder: Path, *, prefix: bool = False) -> Path:
    """Write a tokenizer like GPT-2's: only the regex of the byte-level pre-tokenizer splits text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    return _save_byte_level(_trained_byte_level(tokenizer), folder)


def make_gpt2_prefix(folder: Path) -> Path:
    """Write a tokenizer like RoBERTa's: a space is added before a text that does not begin with one."""
    return make_gpt2(folder, prefix=True)


def make_llama3(folder: Path) -> Path:
    """Write a tokenizer with Llama 3's settings: groups of three digits, whole words before merges."""
    tokenizer = small_inputs.byte_level_tokenizer(
        small_inputs.STUDENT_SPLIT, 600, ["<|begin_of_text|>", "<|end_of_text|>"], small_inputs.sentences(400)
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    return small_inputs.save_tokenizer(tokenizer, folder, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")


def make_tekken(folder: Path) -> Path:
    """Write a tokenizer with Mistral's tekken split: words split at case changes, single digits."""
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = small_inputs.byte_level_tokenizer(TEKKEN_SPLIT, 560, specials, small_inputs.sentences(400, seed=4))
    return small_inputs.save_tokenizer(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_byte_lower(folder: Path) -> Path:
    """Write a byte-level tokenizer that lower-cases and strips accents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return _save_byte_level(_trained_byte_level(tokenizer), folder)


def _sentencepiece_bpe(vocabulary: int, alphabet: str = "") -> Tokenizer:
    """Train BPE over "▁" words with byte fallback; callers replace the normalizer and pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        initial_alphabet=list("▁" + alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in small_inputs.sentences(400) if text.isascii()], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in byte_tokens]
    return Tokenizer.from_str(json.dumps(content))


def _save_sentencepiece(tokenizer: Tokenizer, folder: Path) -> Path:
    return small_inputs.save_tokenizer(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_metaspace_always(folder: Path) -> Path:
    """Write a metaspace tokenizer that adds a space before every piece of text between special tokens."""
    return _save_sentencepiece(_sentencepiece_bpe(700), folder)


def make_llama2(folder: Path) -> Path:
    """Write a tokenizer like Llama 2's: its normalizer adds the leading space and replaces spaces by "▁"."""
    tokenizer = _sentencepiece_bpe(700)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return _save_sentencepiece(tokenizer, folder)


def make_gemma(folder: Path) -> Path:
    """Write a tokenizer like Gemma's: "▁" for spaces, no leading space, "<0x41>" in a text read as ordinary text."""
    tokenizer = _sentencepiece_bpe(720, alphabet="日本é")
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _save_sentencepiece(tokenizer, folder)


def _unigram(normalizer: Any, pre_tokenizer: Any, specials: list[str], unk: str) -> Tokenizer:
    """Make a Unigram tokenizer of all letters and the most frequent words and parts of words, scored by frequency."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    counted_words = small_inputs.word_counts(tokenizer, [*small_inputs.sentences(400, seed=5), ALPHABET])
    counts = Counter(dict.fromkeys("▁" + ALPHABET, 1))
    for word, count in counted_words:
        counts[word] += 4 * count
        for size in (1, 2, 3):
            counts.update({word[at : at + size]: count for at in range(len(word) - size + 1)})
    total = sum(counts.values())
    kept_pieces = sorted(counts.items(), key=lambda item: (len(item[0]) > 1, -item[1], item[0]))[:400]
    pieces = [
        *((special, 0.0) for special in specials),
        *((piece, math.log(count / total)) for piece, count in kept_pieces),
    ]
    tokenizer.model = models.Unigram(pieces, unk_id=specials.index(unk))
    tokenizer.add_special_tokens(specials)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def make_t5(folder: Path) -> Path:
    """Write a Unigram tokenizer like T5's: NFKC, white space collapsed, metaspace, added sentinels."""
    normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    tokenizer = _unigram(
        normalizer, pre_tokenizers.Metaspace(prepend_scheme="always"), ["<pad>", "</s>", "<unk>"], "<unk>"
    )
    tokenizer.add_special_tokens(["<turn>"])  # its id is after the pieces of the model
    tokenizer.add_tokens([AddedToken("<extra_id_0>", lstrip=True, normalized=False)])
    return small_inputs.save_tokenizer(tokenizer, folder, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def make_albert(folder: Path) -> Path:
    """Write a Unigram tokenizer like ALBERT's: quotes, NFKD, no accents, lower case, spaces split off."""
    normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    pieces = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer = _unigram(normalizer, pieces, ["<pad>", "<unk>", "[CLS]", "[SEP]"], "<unk>")
    return small_inputs.save_tokenizer(tokenizer, folder, bos_token="[CLS]", eos_token="[SEP]", unk_token="<unk>")


# The replacements of the charsmap of `make_xlm_r`; a charsmap may contain any.
CHARSMAP = {
    "\t": " ", "\n": " ", "\u3000": " ", "\u00a0": " ", "\u200b": "", "\ufeff": "", "\u2126": "\u03a9", "ﬁ": "fi",
    "①": "1", "½": "1\u20442", "™": "TM", "e\u0301": "é", "a\u0301": "á", "\u1112\u1161": "\ud558", "ｶ": "カ",
}  # fmt: skip


def charsmap(table: dict[str, str]) -> bytes:
    """Return a compiled charsmap as in SentencePiece models: a double-array trie, and the texts its values point to.

    A unit of the trie: bits 0 to 7 are the byte that leads to it, bit 8 whether a key ends there, bits from 10 on the
    number that its index is XORed with to find its children; child 0 contains the value of a key. Here, every node has
    a block of 256 units.
    """
    nodes: list[dict[int, int]] = [{}]
    values: dict[int, int] = {}
    texts = b""
    for key, text in table.items():
        node = 0
        for byte in key.encode():
            if byte not in nodes[node]:
                nodes[node][byte] = len(nodes)
                nodes.append({})
            node = nodes[node][byte]
        values[node] = len(texts)
        texts += text.encode() + b"\0"
    # The children of node n are in block n + 1; unit 0 is the root.
    units = [0] * (256 * (len(nodes) + 1))
    units[0] = 256 << 10
    for node, children in enumerate(nodes):
        for byte, child in children.items():
            index = 256 * (node + 1) ^ byte
            units[index] = (index ^ 256 * (child + 1)) << 10 | (child in values) << 8 | byte
        if node in values:
            units[256 * (node + 1)] = values[node] | 1 << 31
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + texts


def make_xlm_r(folder: Path) -> Path:
    """Write a Unigram tokenizer like XLM-R's: compiled charsmap, collapsed spaces, metaspace; "<0x41>" is a piece."""
    normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap(CHARSMAP)), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer = _unigram(
        normalizer, pre_tokenizers.Metaspace(prepend_scheme="always"), ["<s>", "<pad>", "</s>", "<unk>"], "<unk>"
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"].append(["<0x41>", -3.0])
    return _save_sentencepiece(Tokenizer.from_str(json.dumps(content)), folder)


def make_word_piece_cased(folder: Path) -> Path:
    """Write a tokenizer like BERT's cased one: case and accents are kept, spaces are dropped."""
    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer = small_inputs.word_piece_tokenizer(
        normalizer, 460, [*small_inputs.sentences(400), *small_inputs.ODD_TEXTS, ALPHABET]
    )
    return small_inputs.save_tokenizer(tokenizer, folder, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")


def make_word_level(folder: Path) -> Path:
    """Write a tokenizer of whole words; each word outside of its vocabulary is one unknown token."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=["[UNK]", "[EOS]"], show_progress=False)
    tokenizer.train_from_iterator(small_inputs.sentences(400), trainer)
    return small_inputs.save_tokenizer(tokenizer, folder, eos_token="[EOS]", unk_token="[UNK]")


def make_characters(folder: Path) -> Path:
    """Write a tokenizer of single characters, including spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=["<unk>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator([*small_inputs.sentences(100), "▁##Ġé\n\t日本"], trainer)
    return small_inputs.save_tokenizer(tokenizer, folder, eos_token="<eos>", unk_token="<unk>")


ADDED = [
    AddedToken("<think>", normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("pear", single_word=True, normalized=False),
    AddedToken("Café", normalized=True),
]


def make_added(folder: Path) -> Path:
    """Write a byte-level tokenizer with added words of all kinds."""
    tokenizer = small_inputs.byte_level_tokenizer(
        small_inputs.TEACHER_SPLIT, 500, ["<|endoftext|>"], small_inputs.sentences(400, seed=1)
    )
    tokenizer.add_tokens(ADDED)
    return _save_byte_level(tokenizer, folder)


def make_added_metaspace(folder: Path) -> Path:
    """Write a tokenizer like Llama 2's with added words; each piece of text between them gets a leading space."""
    tokenizer = _sentencepiece_bpe(700)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.add_tokens(ADDED)
    return _save_sentencepiece(tokenizer, folder)


def make_added_lower(folder: Path) -> Path:
    """Write a byte-level tokenizer that normalizes to NFKC and lower case, with added words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    _trained_byte_level(tokenizer)
    tokenizer.add_tokens(ADDED)
    return _save_byte_level(tokenizer, folder)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "student": small_inputs.make_student_tokenizer,
    "teacher": small_inputs.make_teacher_tokenizer,
    "metaspace": small_inputs.make_metaspace_tokenizer,
    "composing": small_inputs.make_composing_tokenizer,
    "word-piece": small_inputs.make_word_piece_tokenizer,
    "gpt2": make_gpt2,
    "gpt2-prefix": make_gpt2_prefix,
    "llama3": make_llama3,
    "tekken": make_tekken,
    "byte-lower": make_byte_lower,
    "metaspace-always": make_metaspace_always,
    "llama2": make_llama2,
    "gemma": make_gemma,
    "t5": make_t5,
    "albert": make_albert,
    "xlm-r": make_xlm_r,
    "word-piece-cased": make_word_piece_cased,
    "word-level": make_word_level,
    "characters": make_characters,
    "added": make_added,
    "added-metaspace": make_added_metaspace,
    "added-lower": make_added_lower,
}


class Families(Mapping[str, Path]):
    """{family: folder}; each tokenizer is trained at its first access."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = MAKERS[name](self._folder / name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MAKERS)

    def __len__(self) -> int:
        return len(MAKERS)
