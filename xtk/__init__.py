"""xtk: distill large language models across tokenizers."""

__version__ = "0.1.0"
