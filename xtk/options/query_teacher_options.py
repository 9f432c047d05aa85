"""Options of `xtk query-teacher` for a service: an API with an OpenAI interface that its provider runs."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.options.declaration import option

CHAT, TEXT, ECHO = "chat", "text", "echo"
MODES = (CHAT, TEXT, ECHO)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How requests are sent to a service."""

    mode: str = option(
        CHAT,
        "chat: the service answers messages; text: it continues prompts. echo: it scores given texts, if it can.",
        choices=MODES,
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
