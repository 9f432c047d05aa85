"""Texts that two tokenizers split differently: reproducible documents of about 6,000 characters."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from measurement import gsm8k, real_data

CHARACTERS = 6000
SENTENCES = (
    "Der schnelle braune Fuchs springt über den faulen Hund, größer als je zuvor. ",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία σε 3 ημέρες. ",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر. ",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। ",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ",
    "Do bạch kim rất quý nên sẽ dùng để lắp vô xương. ",
    "Pijamalı hasta yağız şoföre çabucak güvendi; İstanbul'da. ",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. ",
    "எல்லா மனிதர்களும் சுதந்திரமாகவே பிறக்கின்றனர். ",
    "ყველა ადამიანი იბადება თავისუფალი. ",
)
EMOJI = ("😀", "🤷🏽‍♀️", "👩‍👩‍👧", "🇫🇷", "☎️", "1️⃣", "🏳️‍🌈", "❤️", "🫠", "👍🏿", "🧑‍🚀", "🇺🇳", "™️", "⌚")
WORDS = ("ok", " thanks", "!!", " see you ", "\n", " 12", "...", " lol")
CJK = (
    "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳",
    "いろはにほへとちりぬるをわかよたれそつねならむ",
    "アイウエオカキクケコサシスセソ",
    "모든인간은태어날때부터자유로우며그존엄과권리에있어동등하다",
    "，。！？「」、；：１２３",
    "𠀋𡈽𡌛𡑮𡢽𠮟𩸽",
    "龘靐齉齾爩鱻麤灪",
)


def number_table(rng: random.Random) -> str:
    """Return a table of numbers of many lengths and formats."""
    rows = [
        f"{rng.randint(0, 10**9)},{rng.uniform(-1e4, 1e4):.4f},{rng.randint(0, 99999):05d},"
        f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d},{rng.random():.3e},"
        f"{rng.randint(0, 10**7):,}"
        for _ in range(CHARACTERS // 60)
    ]
    return "\n".join(rows)


def repetitive(rng: random.Random) -> str:
    """Return one short random text, repeated."""
    piece = rng.choice(["x = x + 1\n", "ab", "-", " ", "=", "na ", "0", "\t\n", "the the ", "a\n\n", ".,"])
    return piece * (CHARACTERS // len(piece))


def multilingual(rng: random.Random) -> str:
    """Return sentences in twelve languages."""
    return _concatenate(rng, lambda: rng.choice(SENTENCES))


def emoji(rng: random.Random) -> str:
    """Return emoji of one or several code points, and a few words."""
    return _concatenate(rng, lambda: rng.choice(EMOJI if rng.random() < 0.7 else WORDS))


def cjk(rng: random.Random) -> str:
    """Return common and rare Chinese, Japanese and Korean characters, without spaces."""
    return _concatenate(rng, lambda: "".join(rng.choices(rng.choice(CJK), k=rng.randint(1, 9))))


GENERATORS: dict[str, Callable[[random.Random], str]] = {
    "number tables": number_table,
    "repetitive": repetitive,
    "multilingual": multilingual,
    "emoji": emoji,
    "CJK": cjk,
}


def generated_documents(name: str, documents: int) -> list[str]:
    """Return generated documents of a kind of GENERATORS, the same in every run."""
    rng = random.Random(name)
    return [GENERATORS[name](rng) for _ in range(documents)]


def wikitext() -> list[str]:
    """Return the articles of WikiText-2's validation and test files."""
    corpora = real_data() / "corpora"
    text = "".join((corpora / f"wikitext2-{part}.txt").read_text(encoding="utf-8") for part in ("valid", "test"))
    return [article for article in re.split(r"(?m)^(?= = [^=])", text) if article.strip()]


def corpora(documents: int) -> dict[str, list[str]]:
    """Return all texts by name: the real corpora, and `documents` documents of each generated kind."""
    return {
        "GSM8K": gsm8k(),
        "WikiText-2": wikitext(),
        **{name: generated_documents(name, documents) for name in GENERATORS},
    }


def _concatenate(rng: random.Random, generate_piece: Callable[[], str]) -> str:
    parts: list[str] = []
    length = 0
    while length < CHARACTERS:
        parts.append(generate_piece())
        length += len(parts[-1])
    return "".join(parts)
