"""Options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.options.declaration import INPUTS, REPORTING, option

MAX_DOCUMENT_BYTES = 16_000_000
MAX_ROW_BYTES = 1_000_000_000  # of log-probabilities: a token with 20 listed ones takes 1,600 bytes of JSON
MAX_SEED = 2**32 - 1  # of numpy
MAX_GENERATIONS = 65_536
MAX_COUNT = 2**31 - 1
CHAT, TEXT, ECHO = "chat", "text", "echo"  # modes of a service
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Format of the results."""

    as_json: bool = option(False, "Print results as JSON, one object per line.", flags=("--json",), is_recorded=False)


@dataclass(frozen=True, kw_only=True)
class QuietOption:
    """Progress lines."""

    quiet: bool = option(
        False,
        "Suppress progress lines and notes; errors are still printed.",
        flags=("--quiet", "-q"),
        is_recorded=False,
    )


@dataclass(frozen=True, kw_only=True)
class ForceOption:
    """Replacement of outputs."""

    force: bool = option(
        False,
        "Write a new output where there is one already; the old one is moved aside, to NAME.replaced-1.",
        is_recorded=False,
    )


@dataclass(frozen=True, kw_only=True)
class ConfigOption:
    """Options from a file."""

    config: str = option(
        "",
        "YAML or JSON file with values of these options; options on the command line override it.",
        metavar="FILE",
        is_recorded=False,
    )


@dataclass(frozen=True, kw_only=True)
class TrustRemoteCodeOption:
    """Code of models."""

    trust_remote_code: bool = option(
        False, "Execute Python code shipped with the model; read that code first.", effect=REPORTING
    )


@dataclass(frozen=True, kw_only=True)
class StartTokenOption:
    """What precedes a text."""

    start_token: str = option(
        "auto",
        "Token before each text; auto: as the model's own tokenizer in transformers. Conversations follow their "
        "chat template.",
        metavar="[auto|none|bos|eos|TOKEN]",
    )


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """How documents are read."""

    columns: str = option(
        "",
        "Data columns by field, such as text=body or prompt=question,completion=answer. docs/how-to/data.md lists "
        "the fields.",
        metavar="FIELD=COLUMN,...",
        effect=INPUTS,
    )
    max_document_bytes: int = option(
        MAX_DOCUMENT_BYTES,
        "Maximum size of a document in bytes, as stored in its file; a larger document is an error.",
        min=1,
    )


@dataclass(frozen=True, kw_only=True)
class DocumentColumnOptions:
    """Columns about documents."""

    weight_column: str = option(
        "",
        "Data column with the weight of each document in training: 2 counts twice, 0 not at all.",
        metavar="NAME",
        effect=INPUTS,
    )
    route_column: str = option(
        "",
        "Data column that names each document's teacher by the last part of its path or hub id. Used by distill "
        "--combine-teachers route.",
        metavar="NAME",
        effect=INPUTS,
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How prompts are built from records."""

    prompt_template: str = option(
        "",
        "Jinja template of the prompt, text or .jinja file; variables: fields of a row.",
        metavar="TEXT|FILE.jinja",
        effect=INPUTS,
    )
    apply_chat_template: bool = option(
        False, "Wrap plain-text prompts as user messages in the model's chat template.", effect=INPUTS
    )
    chat_template_kwargs: str = option(
        "", "Chat template arguments as JSON, such as '{\"enable_thinking\": false}'.", metavar="JSON"
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How completions are sampled."""

    max_completion_length: int = option(256, "Maximum number of tokens per completion.", min=1)
    temperature: float = option(1.0, "Sampling temperature; 0: greedy decoding.", min=0)
    top_p: float = option(
        1.0, "Nucleus sampling: sample from the fewest tokens with this total probability.", above=0, max=1
    )
    top_k: int = option(0, "Sample from the K most likely tokens only; 0: from the whole vocabulary.", min=0)
    stop: tuple[str, ...] = option(
        (), "Stop string that ends a completion or turn, and is kept in its text. Repeatable.", metavar="TEXT"
    )


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Rewards of completions, and the environment that replies to them."""

    reward: tuple[str, ...] = option(
        (),
        "Reward of a completion: gsm8k (answer after ####), boxed, regex, json, tests or a Python function. "
        "Repeatable: weighted sum; docs/reference/rewards.md lists the options.",
        metavar="NAME[:KEY=VALUE,...]|FILE.py:FUNCTION",
    )
    scale_rewards: bool = option(True, "Divide advantages by the prompt's standard deviation of rewards, as in GRPO.")
    environment: str = option(
        "",
        "Python class that replies to the student (a tool, a game); its file is executed. docs/how-to/tools.md "
        "describes its methods.",
        metavar="FILE.py:CLASS",
    )
    max_turns: int = option(8, "Maximum number of student turns per rollout in the environment (--environment).", min=1)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers of a backend: vLLM or SGLang servers that the user runs."""

    server: tuple[str, ...] = option(
        (),
        "With --backend server: server URL such as http://localhost:8000/v1, or URL#MODEL. Repeat it to spread "
        "requests over equal servers.",
        metavar="URL",
    )
    concurrency: int = option(
        32, "With --backend server: maximum number of concurrent requests, over all servers.", min=1
    )


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Requests of `xtk query-teacher` to a service: an API with an OpenAI interface that its provider runs."""

    mode: str = option(
        CHAT,
        "chat: the service answers messages; text: it continues prompts. echo: it scores given texts, if it can.",
        choices=(CHAT, TEXT, ECHO),
    )
    top_logprobs: int = option(20, "Listed tokens per position; services allow 5 or 20.", min=0, max=1000)
    max_completion_length: int = option(512, "Maximum number of tokens of an answer.", min=1)
    temperature: float = option(1.0, "Sampling temperature of answers; log-probabilities are those at 1.", min=0)
    concurrency: int = option(8, "Requests in flight.", min=1)
    api_key_env: str = option(
        "", "Environment variable with the API key. Default: XTK_API_KEY or OPENAI_API_KEY.", metavar="NAME"
    )
    max_requests_per_minute: float = option(0, "Maximum requests per minute; 0: no limit.", min=0)
    max_tokens_per_minute: float = option(0, "Maximum tokens per minute, of prompts and answers; 0: no limit.", min=0)
    max_cost: float = option(0, "Stop before the cost exceeds this, in the unit of the prices; 0: no limit.", min=0)
    input_price: float = option(
        0, "Price of a million prompt tokens, in any currency: for the printed cost and --max-cost.", min=0
    )
    output_price: float = option(0, "Price of a million answer tokens, as --input-price.", min=0)
