"""HTTP servers as processes of their own: one that answers as vLLM does, and one that gets in the way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import xtk_processes

CLAMPED = -9999.0


class Served:
    """A server that runs: its address, and its end."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        here, there = xtk_processes._forks.Pipe()
        self.process = xtk_processes._forks.Process(target=target, args=(there, *arguments), daemon=True)
        self.process.start()
        if not here.poll(120):
            self.kill()
            raise TimeoutError("the server did not start")
        self.host = f"http://127.0.0.1:{here.recv()}"
        self.url = self.host + "/v1"

    def kill(self) -> None:
        """Take it down as the kernel would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def trouble(self, kind: str = "", times: int = 1, after: int = 0) -> None:
        """Let a proxy get in the way: of so many scoring requests, after it let some through."""
        body = json.dumps({"kind": kind, "times": times, "after": after}).encode()
        with urlopen(Request(self.host + "/trouble", data=body)):
            pass

    def seen(self) -> dict[str, Any]:
        """What a proxy saw since trouble was last asked of it."""
        with urlopen(self.host + "/trouble") as answer:
            return json.load(answer)


@contextlib.contextmanager
def served(target: Callable[..., None], *arguments: object) -> Iterator[Served]:
    server = Served(target, *arguments)
    try:
        yield server
    finally:
        server.kill()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


def _serve(handler: type[_Handler], told: Connection, port: int = 0) -> None:
    server = _Server(("127.0.0.1", port), handler)
    told.send(server.server_address[1])
    server.serve_forever()


def answer_as_vllm(told: Connection, folder: str, names: list[str], options: dict[str, Any]) -> None:
    """Serve a model with transformers, in the words of vLLM's completions API, as far as xtk uses them.

    Options: `max_logprobs`, `key` (that a client needs), `plain` (tell nothing of prompts, as other servers do),
    `processed` (vLLM's --logprobs-mode processed_logprobs), `no_ids` (do not tell the prompt's ids).
    """
    import torch

    from xtk.models.causal_lm import load_causal_lm

    torch.set_num_threads(1)
    model = load_causal_lm(Path(folder))
    context = model.config.max_position_embeddings
    answers = _Answers(model, Path(folder), names, options, context)

    class Handler(_Handler):
        def do_GET(self) -> None:
            if self.path != "/v1/models":
                return self.answer(404, {"detail": "Not Found"})
            if not self.allowed():
                return None
            data = [{"id": name, "root": root, "max_model_len": options.get("says", context)} for name, root in
                    (name.split("=") if "=" in name else (name, folder) for name in names)]  # fmt: skip
            return self.answer(200, {"object": "list", "data": data})

        def do_POST(self) -> None:
            question = self.body()
            if self.path != "/v1/completions":
                return self.answer(404, {"detail": "Not Found"})
            if not self.allowed():
                return None
            return self.answer(*answers.answer(question))

        def allowed(self) -> bool:
            key = options.get("key")
            if not key or self.headers["Authorization"] == f"Bearer {key}":
                return True
            self.answer(401, {"error": "Unauthorized"})
            return False

    _serve(Handler, told)


def answer_as_sglang(told: Connection, folder: str, options: dict[str, Any]) -> None:
    """Serve a model with transformers, in the form of SGLang's `/generate`, as far as xtk uses it.

    SGLang itself does not install without a GPU. Its form is that of its documentation and of clients of it.
    Options: `starts` (id of a token that it puts before texts), `change` (of the answer's meta_info).
    """
    import torch

    from xtk.models.causal_lm import load_causal_lm

    torch.set_num_threads(1)
    model = load_causal_lm(Path(folder))
    context = model.config.max_position_embeddings
    answers = _Answers(model, Path(folder), ["teacher"], {}, context)

    class Handler(_Handler):
        def do_GET(self) -> None:
            card = {"id": "teacher", "object": "model", "owned_by": "sglang", "root": folder, "max_model_len": context}
            self.answer(200, {"object": "list", "data": [card]})

        def do_POST(self) -> None:
            question = self.body()
            if self.path != "/generate":
                return self.answer(404, {"detail": "Not Found"})
            ids = question.get("input_ids")
            if ids is None:
                ids = [*options.get("starts", []), *answers.tokenizer.encode([question["text"]])[0].ids.tolist()]
            if len(ids) >= context:
                return self.answer(
                    400, {"error": {"message": f"The input is longer than the context length {context}."}}
                )
            assert question["return_logprob"]
            assert question["logprob_start_len"] == question["sampling_params"]["max_new_tokens"] == 0
            with answers.lock:
                logprobs = answers.logprobs(ids)
            own: list[Any] = [[None, ids[0], None]]
            own += [[float(row[token]), token, None] for row, token in zip(logprobs[:-1], ids[1:], strict=True)]
            best = [row.topk(question["top_logprobs_num"]) for row in logprobs[:-1]]
            top = [None, *([[value, token, None] for value, token in zip(*map(list, (one.values.tolist(),
                   one.indices.tolist())), strict=True)] for one in best)]  # fmt: skip
            meta = {"input_token_logprobs": own, "input_top_logprobs": top, "prompt_tokens": len(ids)}
            return self.answer(200, {"text": "", "meta_info": meta})

    _serve(Handler, told)


class _Answers:
    def __init__(self, model: Any, folder: Path, names: list[str], options: dict[str, Any], context: int) -> None:
        from xtk.tokens.tokenizer import Tokenizer

        self.model, self.names, self.options, self.context = model, names, options, context
        self.tokenizer = Tokenizer(folder)
        self.lock = threading.Lock()

    def answer(self, question: dict[str, Any]) -> tuple[int, Any]:
        prompt, K = question["prompt"], question.get("prompt_logprobs", 0)
        if question["model"] not in [name.partition("=")[0] for name in self.names]:
            return 404, _error(404, f"The model `{question['model']}` does not exist.")
        most = self.options.get("max_logprobs", 20)
        if most < K:
            return 400, _error(400, f"Requested prompt logprobs of {K}, which is greater than max allowed: {most}")
        ids = self.tokenizer.encode([prompt])[0].ids.tolist() if isinstance(prompt, str) else prompt
        if len(ids) > self.context:
            text = f"This model's maximum context length is {self.context} tokens. However, your prompt contains"
            return 400, _error(400, f"{text} {len(ids)} input tokens")
        if len(ids) == self.context:
            return 400, _error(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        with self.lock:
            logprobs = self.logprobs(ids)
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        if not self.options.get("plain"):
            rows = zip(logprobs[:-1], ids[1:], strict=True)
            choice["prompt_logprobs"] = [None, *(_entry(row, token, K) for row, token in rows)]
        if question.get("return_token_ids") and not self.options.get("no_ids"):
            choice["prompt_token_ids"] = ids
        if "logprobs" in question:
            choice["logprobs"] = self.generated(logprobs[-1], question)
        return 200, {"object": "text_completion", "model": question["model"], "choices": [choice]}

    def generated(self, row: Any, question: dict[str, Any]) -> dict[str, Any]:
        (token,) = question["allowed_token_ids"]
        assert question["return_tokens_as_token_ids"]
        assert question["max_tokens"] == 1
        if self.options.get("processed"):
            row = row.clone().fill_(-float("inf"))
            row[token] = 0.0
        entry = _entry(row, token, question["logprobs"])
        named = {f"token_id:{number}": value["logprob"] for number, value in entry.items()}
        return {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [named[f"token_id:{token}"]],
            "top_logprobs": [named],
            "text_offset": [0],
        }

    def logprobs(self, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}


def _entry(row: Any, token: int, K: int) -> dict[str, dict[str, Any]]:
    """What is told of a position: the token that stands there, then the K likeliest but for it."""
    values, ids = row.topk(K)
    pairs = dict([(token, float(row[token])), *zip(ids.tolist(), values.tolist(), strict=True)])
    return {
        str(number): {"logprob": max(value, CLAMPED), "rank": int((row >= value).sum()), "decoded_token": '\\"{},:1'}
        for number, value in pairs.items()
    }


def generate_as_vllm(told: Connection, folder: str, options: dict[str, Any]) -> None:
    """Generate with transformers, and take new weights, in the words of vLLM's server.

    Options: `port`; `keeps_head` (of a tied model: new weights never reach its output head); `dies_at` (the process
    ends at that many completion requests); `seconds` (of one completion); `shift` (nats, added to each
    log-probability after the first new weights); `unversioned` (knows no version of its weights).
    """
    import torch
    from safetensors.torch import load_file

    from xtk.models.causal_lm import load_causal_lm

    torch.set_num_threads(1)
    model = load_causal_lm(Path(folder))
    if options.get("keeps_head"):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    context = model.config.max_position_embeddings
    answers = _Answers(model, Path(folder), ["student"], {}, context)
    spelling = answers.tokenizer.vocabulary.bytes_of
    letters = [token for token in range(5, len(answers.tokenizer)) if spelling(token).strip().isalpha()]
    state: dict[str, Any] = {"version": "default", "asked": 0, "updates": 0}

    def reload(path: str) -> None:
        weights: dict[str, Any] = {}
        for file in Path(path).glob("*.safetensors"):
            weights |= load_file(file)
        if options.get("keeps_head"):
            weights.pop("lm_head.weight", None)
        with answers.lock:
            model.load_state_dict(weights, strict=False)
        state["updates"] += 1

    def drawn(row: Any, seed: int) -> int:
        """A token with text, which teachers read; its log-probability is still that among all tokens."""
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        return letters[int(torch.multinomial(row[letters].exp(), 1, generator=generator))]

    def generate(question: dict[str, Any]) -> tuple[int, Any]:
        state["asked"] += 1
        if state["asked"] == options.get("dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(options.get("seconds", 0))
        prompt = question["prompt"]
        ids = answers.tokenizer.encode([prompt])[0].ids.tolist() if isinstance(prompt, str) else list(prompt)
        count, values = len(ids), []
        for _ in range(question["max_tokens"]):
            with answers.lock:
                row = answers.logprobs(ids)[-1][: len(answers.tokenizer)]
            ids.append(
                int(row.argmax())
                if question.get("temperature") == 0
                else drawn(row, question.get("seed", 0) + len(ids))
            )
            values.append(float(row[ids[-1]]) + (options.get("shift", 0.0) if state["updates"] else 0.0))
            if ids[-1] in question.get("stop_token_ids", ()):
                break
        told = {"token_logprobs": values, "top_logprobs": [{}] * len(values)}
        choice = {"index": 0, "token_ids": ids[count:], "prompt_token_ids": ids[:count], "logprobs": told}
        return 200, {"choices": [choice]}

    class Handler(_Handler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                return self.answer(200, {"data": [{"id": "student", "root": folder, "max_model_len": context}]})
            if self.path == "/weight_info" and not options.get("unversioned"):
                return self.answer(200, {"weight_version": state["version"]})
            return self.answer(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            question = self.body()
            if self.path == "/v1/completions":
                return self.answer(*generate(question))
            if self.path == "/collective_rpc":
                reload(question["kwargs"]["weights_path"])
                return self.answer(200, {"results": [None]})
            if self.path == "/reset_prefix_cache":
                return self.answer(200, {"success": True})
            if self.path == "/update_weight_version" and not options.get("unversioned"):
                state["version"] = question["new_version"]
                return self.answer(200, {"success": True, "new_version": state["version"]})
            return self.answer(404, {"detail": "Not Found"})

    _serve(Handler, told, options.get("port", 0))


def get_in_the_way(told: Connection, upstream: str) -> None:
    """Pass requests on, and do what `Served.trouble` asks to those that are sent token ids."""
    host = urlsplit(upstream).netloc
    state: dict[str, Any] = {"kind": "", "times": 0, "after": 0}
    counts = {"requests": 0, "running": 0, "most": 0, "connections": 0}
    lock = threading.Lock()

    def due() -> str:
        if state["after"] > 0:
            state["after"] -= 1
            return ""
        if state["times"] == 0:
            return ""
        state["times"] -= 1
        return state["kind"]

    class Proxy(_Handler):
        def setup(self) -> None:
            super().setup()
            with lock:
                counts["connections"] += 1

        def do_GET(self) -> None:
            if self.path == "/trouble":
                return self.answer(200, counts)
            return self.answer(*self.passed_on(None))

        def do_POST(self) -> None:
            question = self.body()
            if self.path == "/trouble":
                state.update(question)
                counts.update(dict.fromkeys(counts, 0))
                return self.answer(200, {})
            if isinstance(question.get("prompt"), str):
                return self.answer(*self.passed_on(question))
            with lock:
                kind = due()
                counts["requests"] += 1
                counts["running"] += 1
                counts["most"] = max(counts["most"], counts["running"])
            try:
                self.troubled(kind, question)
            finally:
                with lock:
                    counts["running"] -= 1
            return None

        def troubled(self, kind: str, question: Any) -> None:
            if kind.isdecimal():
                wait = {"Retry-After": "1"} if kind == "429" else {}
                self.answer(int(kind), {"error": {"message": "made by the test"}}, wait)
            elif kind == "hang":
                time.sleep(600)
            elif kind == "close":
                self.leave()
            else:
                status, raw = self.passed_on(question)
                self.spoilt(kind, status, raw)

        def spoilt(self, kind: str, status: int, raw: bytes) -> None:
            if kind in ("cut", "drip"):
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                for at in range(len(raw) // 2):
                    self.wfile.write(raw[at : at + 1])
                    if kind == "drip":
                        time.sleep(0.05)
                self.leave()
            elif kind == "html":
                self.answer(200, b"<html>a gateway says hello</html>")
            else:
                self.answer(status, SPOIL[kind](raw) if kind else raw)

        def leave(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def passed_on(self, question: Any) -> tuple[int, bytes]:
            connection = HTTPConnection(host, timeout=120)
            body = None if question is None else json.dumps(question)
            headers = {name: value for name, value in self.headers.items() if name == "Authorization"}
            headers["Content-Type"] = "application/json"
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    _serve(Proxy, told)


def _changed(change: Callable[[list[Any]], Any]) -> Callable[[bytes], bytes]:
    def spoil(raw: bytes) -> bytes:
        answer = json.loads(raw)
        told = answer["choices"][0]["prompt_logprobs"]
        change(told)
        return json.dumps(answer).encode()

    return spoil


def _last(told: list[Any]) -> dict[str, Any]:
    return list(told[-1].values())[-1]


def _put_other_token(told: list[Any]) -> None:
    told[-1] = {str((int(number) + 1) % 400): value for number, value in told[-1].items()}


SPOIL: dict[str, Callable[[bytes], bytes]] = {
    "nan": lambda raw: re.sub(rb'"logprob": ?[^,}]+', b'"logprob": NaN', raw),
    "null": _changed(lambda told: _last(told).update(logprob=None)),
    "text": _changed(lambda told: _last(told).update(logprob="-1.5")),
    "no-entry": _changed(lambda told: told.__setitem__(-1, None)),
    "short": _changed(lambda told: told.pop()),
    "few": _changed(lambda told: [told[-1].pop(key) for key in list(told[-1])[1:3]]),
    "other-token": _changed(_put_other_token),
    "huge-id": _changed(lambda told: told[-1].update({"9" * 30: told[-1].pop(list(told[-1])[-1])})),
    "logits": _changed(lambda told: [one.update(logprob=one["logprob"] + 9) for one in told[-1].values()]),
    "minus-infinity": _changed(lambda told: next(iter(told[-1].values())).update(logprob=CLAMPED)),
    "list": lambda raw: b"[]",
    "empty": lambda raw: b"",
    "no-choices": lambda raw: b'{"choices": []}',
}
