"""`xtk evaluate`: bits per byte, on any text, for any causal model."""

from __future__ import annotations

from typing import Annotated

import typer

from xtk import terminal
from xtk.commands import options


def evaluate(
    model: Annotated[str, typer.Argument(help="A model folder or hub id; - for a pipe.", metavar="MODEL")],
    data: Annotated[
        list[str],
        typer.Argument(
            help=".jsonl, .parquet, .arrow, .txt (a document each), a glob in quotes, a hub dataset.", metavar="DATA..."
        ),
    ],
    columns: options.Columns = "",
    dtype: Annotated[
        str, typer.Option(help="Of the model's arithmetic; sums are float64.", metavar="[float32|bfloat16|float16]")
    ] = "float32",
    max_length: Annotated[int, typer.Option(help="Tokens read at once, if less than the context; 0: the context.")] = 0,
    batch_tokens: Annotated[int, typer.Option(help="Padded tokens in a forward pass.")] = 8192,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    config: options.Config = "",
) -> None:
    """Measure the bits that a model needs for a byte of text; comparable between tokenizers.

    A document longer than the context is read in windows that overlap by half.
    """
    from xtk.artifacts.corpus import Corpus, columns_option
    from xtk.artifacts.hub import local_folder, with_adapter

    terminal.set_quiet(quiet)
    if model == "-" and "-" in data:
        raise typer.BadParameter("only one of MODEL and DATA can come through the pipe")
    model = terminal.path_argument(model)
    folder, adapter = with_adapter(local_folder(model, weights=True))
    corpus = Corpus(data, columns_option(columns))

    from xtk.evaluation.bits import bits_per_byte
    from xtk.lookup import lookup
    from xtk.models.causal_lm import DTYPES, Cut, check_rows, default_device, load_causal_lm
    from xtk.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder, name=model)
    lookup(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    network = load_causal_lm(
        folder,
        dtype=DTYPES[dtype],
        device=default_device(),
        trust_remote_code=trust_remote_code,
        adapter=adapter,
    )
    check_rows(network, tokenizer)
    found = bits_per_byte(Cut(network), tokenizer, corpus, batch_tokens=batch_tokens, max_length=max_length or None)
    if as_json:
        terminal.result_json(
            {
                "model": model,
                "data": data[0] if len(data) == 1 else data,
                "bits_per_byte": found.bits_per_byte,
                "bytes": found.bytes,
                "documents": found.documents,
                "tokens": found.tokens,
                "windows": found.windows,
            }
        )
    else:
        terminal.result_line(
            f"{found.bits_per_byte:.4f} bits per byte  {model}  "
            f"({found.bytes:,} bytes, {found.documents:,} documents of {', '.join(data)})"
        )
