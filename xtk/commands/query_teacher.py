"""`xtk query-teacher`: answers of a service, with log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, Heading, argument, option, options_of, output_option
from xtk.options.shared import ECHO, ConfigOption, CorpusOptions, JsonOption, QuietOption, ServiceOptions


@dataclass(frozen=True, kw_only=True)
class QueryTeacherOptions(CorpusOptions, ServiceOptions, JsonOption, QuietOption, ConfigOption, CommandOptions):
    """Options of `xtk query-teacher`."""

    HEADINGS = (Heading("Data", (CorpusOptions,)), Heading("Service", (ServiceOptions, "estimate")))

    server: str = argument(REQUIRED, "URL of the service and name of the model.", metavar="URL#MODEL")
    data: tuple[str, ...] = argument(
        REQUIRED, "Prompts, or texts with --mode echo; - reads standard input.", metavar="DATA..."
    )
    output: str = output_option("Output file (JSON lines); an unfinished one is continued.", "FILE")
    estimate: bool = option(False, "Print the number of requests, tokens and the largest cost, and send nothing.")


def query_teacher(options: QueryTeacherOptions) -> None:
    """Store answers of a service with their log-probabilities.

    A service is an API with an OpenAI interface and log-probabilities (for an own vLLM server: cache-teacher
    --backend server). cache import makes a teacher cache from the file.

    Examples:
        xtk query-teacher https://api.example.com/v1#model prompts.jsonl --api-key-env KEY -o answers.jsonl
        xtk query-teacher http://localhost:8000/v1#model corpus.jsonl --mode echo -o scored.jsonl
    """
    from pathlib import Path

    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.data.record_to_document import record_to_prompt
    from xtk.files.output import Output
    from xtk.importers.service_answers import (
        ANSWERS,
        AnswerFile,
        ServiceClient,
        estimate,
        make_requests,
        note_usual_limit,
    )

    terminal.set_quiet(options.quiet)
    service = options_of(ServiceOptions, options)
    corpus = Corpus(options.data, parse_columns_option(options.columns), options.max_document_bytes)
    if service.mode == ECHO:
        documents = [*corpus]
    else:
        documents = [record_to_prompt(record, corpus.columns, where) for record, where in corpus.records()]
    requests = make_requests(documents, options.server, service)
    if options.estimate:
        figures = estimate(requests, service)
        note_usual_limit(service)
        if options.as_json:
            terminal.result_json({"path": options.output, "kind": "answers-estimate", **figures})
        else:
            for name, value in figures.items():
                terminal.result_line(f"{name:24} {value:,}")
        return
    client, path = ServiceClient(options.server, service), Path(options.output)
    output = Output(path, ANSWERS, inputs=options.data)
    output.find_finished()
    with output.lock():
        client.request_answers(requests, AnswerFile(path, requests))
    result = {"path": options.output, "kind": "answers", "answers": len(requests), "cost": round(client.cost, 6)}
    terminal.result_artifact(result, as_json=options.as_json)
