"""Pairs of pretrained models, and the lines of their tables: losses, the weights of cross-entropy, other trainers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

SMOLLM2, GEMMA = "smollm2-135m-instruct.gguf", "gemma-3-270m.gguf"
QWEN_SMALL, QWEN = "qwen2.5-coder-0.5b-instruct.gguf", "qwen2.5-coder-1.5b-instruct.gguf"
# What students without a start token of their own read before a text: the separator of texts in their pretraining.
START_TOKENS = {SMOLLM2: "<|endoftext|>"}
NOT_TRAINED, TEACHER = "not trained", "teacher"
SMALL_FUNCTIONS = "small functions"  # a measure: pass rates of xtk/quickstart/small_functions.txt
CE_WEIGHT = 0.3  # of the default of `distill` for teachers with other tokenizers


@dataclass(frozen=True)
class Line:
    """A line of a table: how students are trained.

    Attributes:
        losses: values of `--loss`; `{weight}` is replaced by each weight of the grid.
        source: `cache`, `answers` (of the teacher), `prompts` (on-policy), or `trl` (TRL's trainer).
        options: further options of the command; names of models are replaced by their files.
        continues: whether it begins from the student of the default line instead of the pair's.
    """

    losses: tuple[str, ...]
    source: str = "cache"
    options: tuple[str, ...] = ()
    continues: bool = False

    @property
    def has_grid(self) -> bool:
        """Whether the line is trained with each weight of cross-entropy."""
        return any("{weight}" in loss for loss in self.losses)

    def with_weight(self, weight: float) -> Line:
        """Return the line with a weight of cross-entropy; the loss is left out at weight 0."""
        losses = [loss.format(weight=f"{weight:g}") for loss in self.losses]
        losses = ["ce" if loss == "ce:weight=1" else loss for loss in losses]
        return replace(self, losses=tuple(loss for loss in losses if loss != "ce:weight=0"))

    @property
    def name(self) -> str:
        """The losses, source and options as one text; the name of its runs."""
        source = [] if self.source == "cache" else [f"({self.source})"]
        return " ".join([*(["default, then"] if self.continues else []), "+".join(self.losses), *source, *self.options])


def _with_ce(loss: str) -> Line:
    return Line(("ce:weight={weight}", loss))


CE, CE_ON_ANSWERS = Line(("ce",)), Line(("ce",), "answers")
DEFAULT = Line((f"ce:weight={CE_WEIGHT:g}", "byte-kl"))
SAME_TOKENIZER_DEFAULT = Line(("ce", "forward-kl"))
# The published divergence of strict, reverse KL, needs probabilities that a cache does not contain.
LOSSES = (
    "byte-kl",
    "bpm",
    "escd",
    "strict:divergence=forward-kl",
    "simct",
    "gold",
    "uld",
    "alm",
    "p-kl",
    "boundary-kl",
)
LINES = (
    CE,
    CE_ON_ANSWERS,
    DEFAULT,
    *map(_with_ce, LOSSES),
    Line(("gold", "ce:weight={weight}"), "trl"),
    Line(("uld", "ce:weight={weight}"), "trl"),
)
SHORT_LINES = (CE, DEFAULT, _with_ce("byte-kl"))
# Steps of on-policy lines train on completions that the student samples. `teacher=none` is the control without the
# teacher's log-probabilities. A reference needs a teacher that is another model.
ON_POLICY = (
    Line(("bpm",), "prompts"),
    Line(("byte-kl",), "prompts"),
    Line(("policy-gradient",), "prompts"),
    Line(("policy-gradient:offset=0.5",), "prompts", ("--reference", QWEN_SMALL)),
    Line(("policy-gradient:teacher=none",), "prompts"),
    Line(("bpm",), "prompts", continues=True),
)


@dataclass(frozen=True)
class Pair:
    """A student and a teacher, and their data.

    Attributes:
        data: the prefix of its files of texts: `code`, `text` or `maths`.
        other: texts of other kinds, for what the student forgets.
        default: the line that `distill` chooses itself.
        lines: lines of the table.
        tokenizer: the model whose tokenizer the student gets before training; "" for its own.
    """

    teacher: str
    student: str
    data: str
    other: tuple[str, ...]
    default: Line = DEFAULT
    lines: tuple[Line, ...] = field(default=LINES)
    tokenizer: str = ""


CEILING_LINES = (CE, SAME_TOKENIZER_DEFAULT, Line(("ce:weight={weight}", "forward-kl")), _with_ce("byte-kl"))
PAIRS = {
    "code": Pair(QWEN, SMOLLM2, "code", ("humaneval", "wikitext")),
    "code-gemma": Pair(QWEN, GEMMA, "code", ("humaneval", "wikitext")),
    "text": Pair(GEMMA, SMOLLM2, "text", ("humaneval", "gsm8k")),
    "maths": Pair(QWEN, SMOLLM2, "maths", ("humaneval", "wikitext"), lines=(*LINES[:1], *LINES[2:-2], *ON_POLICY)),
    "maths-gemma": Pair(QWEN, GEMMA, "maths", ("humaneval", "wikitext"), lines=(*LINES[:1], *LINES[2:-2], *ON_POLICY)),
    "same-tokenizer": Pair(QWEN, QWEN_SMALL, "code", ("humaneval", "wikitext"), SAME_TOKENIZER_DEFAULT, CEILING_LINES),
    "transplanted": Pair(QWEN, QWEN_SMALL, "code", ("humaneval", "wikitext"), lines=LINES[:4], tokenizer=SMOLLM2),
}
