"""Small real inputs for tests: tokenizers that differ as those of Llama 3 and Qwen do, models, a corpus."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

NAMES = ["Anna", "Bert", "Clara", "Dora", "Emil", "Frieda", "Gustav", "Hanna", "Ida", "Jakob"]
THINGS = ["apples", "pears", "books", "stones", "coins", "tickets", "marbles", "cups", "shells", "cards"]
ODD_TEXTS = [
    "café au lait — 12,50 €",
    "naïve façade",
    "日本語の文",
    "emoji 😀👩‍👩‍👧 end",
    "tab\there\nnew line",
    "x = 3.14159;",
    "Ünïcödé",
]
STUDENT_SPLIT = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEACHER_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Pair:
    """A student and a teacher with different tokenizers."""

    student: Path
    teacher: Path


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return short arithmetic word problems, always the same for the same seed."""
    rng = random.Random(seed)
    texts = []
    for number in range(count):
        name, other = rng.sample(NAMES, 2)
        total, given, thing = rng.randint(20, 2999), rng.randint(1, 19), rng.choice(THINGS)
        text = f"{name} has {total} {thing} and gives {given} to {other}. Now {name} has {total - given} {thing} left."
        texts.append(text + (" " + rng.choice(ODD_TEXTS) if number % 5 == 0 else ""))
    return texts


def byte_level_tokenizer(split: str, vocabulary: int, specials: list[str], texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def metaspace_tokenizer(vocabulary: int, texts: list[str]) -> Tokenizer:
    """Train a SentencePiece-like BPE tokenizer with byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator([text for text in texts if text.isascii()], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in byte_tokens]
    return Tokenizer.from_str(json.dumps(content))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, **special_tokens: str | None) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`, as in the folder of a model; a text follows bos, else eos."""
    folder.mkdir(parents=True, exist_ok=True)
    start = special_tokens.get("bos_token") or special_tokens.get("eos_token")
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.token_to_id(start))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    return folder


def write_sentencepiece_model(folder: Path) -> None:
    """Train a SentencePiece BPE model with byte fallback, and write it as `tokenizer.model`."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(800)), model_prefix=str(folder / "tokenizer"), vocab_size=420,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip


def make_student_tokenizer(folder: Path, vocabulary: int = 640) -> Path:
    """Write a tokenizer like Llama 3's: numbers in groups of three digits, a bos token."""
    special_tokens = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"]
    tokenizer = byte_level_tokenizer(STUDENT_SPLIT, vocabulary, special_tokens, sentences(400))
    return save_tokenizer(
        tokenizer, folder, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", pad_token="<|pad|>"
    )


def make_teacher_tokenizer(folder: Path, vocabulary: int = 480) -> Path:
    """Write a tokenizer like Qwen's: single digits, no bos token."""
    tokenizer = byte_level_tokenizer(TEACHER_SPLIT, vocabulary, ["<|endoftext|>", "<|im_end|>"], sentences(400, seed=1))
    return save_tokenizer(tokenizer, folder, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_metaspace_tokenizer(folder: Path, vocabulary: int = 700) -> Path:
    """Write a tokenizer like Mistral 7B's: metaspace, byte fallback."""
    tokenizer = metaspace_tokenizer(vocabulary, sentences(400))
    return save_tokenizer(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_composing_tokenizer(folder: Path, vocabulary: int = 480) -> Path:
    """Write a byte-level tokenizer with Qwen's normalizer, NFC: "e" + U+0301 becomes U+00E9."""
    texts = [*sentences(400, seed=1), *ODD_TEXTS]
    tokenizer = byte_level_tokenizer(TEACHER_SPLIT, vocabulary, ["<|endoftext|>"], texts)
    tokenizer.normalizer = normalizers.NFC()
    return save_tokenizer(tokenizer, folder, bos_token=None, eos_token="<|endoftext|>")


def word_counts(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[str, int]]:
    """Return the words that a tokenizer's normalizer and pre-tokenizer produce, with counts, the most frequent first.

    The trainers of WordPiece and Unigram are not deterministic; vocabularies that are made from these counts are.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def word_piece_tokenizer(normalizer: object, vocabulary: int, texts: list[str]) -> Tokenizer:
    """Make a WordPiece tokenizer: all letters, at the start and inside of words, then the most frequent words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    words = [word for word, _ in word_counts(tokenizer, texts)]
    letters = sorted(set("".join(words)))
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    endings = [f"##{word[-size:]}" for size in (2, 3) for word in words if len(word) > size + 1]
    pieces = [*specials, *letters, *(f"##{letter}" for letter in letters), *words[: vocabulary // 2], *endings]
    vocabulary_ids = {piece: token_id for token_id, piece in enumerate(list(dict.fromkeys(pieces))[:vocabulary])}
    tokenizer.model = models.WordPiece(vocabulary_ids, unk_token="[UNK]")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def make_word_piece_tokenizer(folder: Path, vocabulary: int = 400) -> Path:
    """Write a tokenizer like BERT's uncased one: lower case, no accents, no spaces, "##" inside words."""
    normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer = word_piece_tokenizer(normalizer, vocabulary, sentences(400))
    return save_tokenizer(tokenizer, folder, bos_token="[CLS]", eos_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]")


def make_student(folder: Path, *, context: int = 256, seed: int = 0) -> Path:
    """Write a small Llama with untied embeddings and a few more embedding rows than its tokenizer has tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_student_tokenizer(folder)
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=656, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=context, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


def make_teacher(folder: Path, *, context: int = 256, seed: int = 1) -> Path:
    """Write a small Qwen3 with tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_teacher_tokenizer(folder)
    torch.manual_seed(seed)
    configuration = Qwen3Config(
        vocab_size=496, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=context, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    Qwen3ForCausalLM(configuration).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """Write texts as a JSONL file, one record `{"text": ...}` per line."""
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path
