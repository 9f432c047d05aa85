"""HTTP servers as separate processes: imitations of vLLM and SGLang, and a proxy that injects faults."""

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

MIN_LOGPROB = -9999.0


class ServerProcess:
    """A running server process and its address."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        parent_end, child_end = xtk_processes.fork_context.Pipe()
        self.process = xtk_processes.fork_context.Process(target=target, args=(child_end, *arguments), daemon=True)
        self.process.start()
        if not parent_end.poll(120):
            self.kill()
            raise TimeoutError("the server did not start")
        self.host = f"http://127.0.0.1:{parent_end.recv()}"
        self.url = self.host + "/v1"

    def kill(self) -> None:
        """End the process with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def inject_fault(self, kind: str = "", times: int = 1, after: int = 0) -> None:
        """Let a proxy apply a fault to `times` scoring requests (-1: all), after it has forwarded `after` requests."""
        body = json.dumps({"kind": kind, "times": times, "after": after}).encode()
        with urlopen(Request(self.host + "/fault", data=body)):
            pass

    def request_counts(self) -> dict[str, Any]:
        """Return the counts of requests and connections of a proxy since the last `inject_fault`."""
        with urlopen(self.host + "/fault") as response:
            return json.load(response)


@contextlib.contextmanager
def run_server(target: Callable[..., None], *arguments: object) -> Iterator[ServerProcess]:
    server = ServerProcess(target, *arguments)
    try:
        yield server
    finally:
        server.kill()


class JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def read_json(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))

    def respond(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass


def serve_handler(handler: type[JsonHandler], ready: Connection, port: int = 0) -> None:
    server = _HttpServer(("127.0.0.1", port), handler)
    ready.send(server.server_address[1])
    server.serve_forever()


def serve_as_vllm(ready: Connection, folder: str, names: list[str], options: dict[str, Any]) -> None:
    """Serve a model with transformers and the part of vLLM's completions API that xtk uses.

    Options: `max_logprobs`, `max_model_len` (the reported one), `key` (the API key that clients must send),
    `no_prompt_logprobs` (return none, as other servers do), `processed` (vLLM's --logprobs-mode processed_logprobs),
    `no_ids` (do not return the prompt's token ids).
    """
    import torch

    from xtk.models.causal_lm import load_causal_lm
    from xtk.models.resolver import ModelRef

    torch.set_num_threads(1)
    model = load_causal_lm(ModelRef(Path(folder)))
    context = model.config.max_position_embeddings
    completion_model = _CompletionModel(model, Path(folder), names, options, context)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path != "/v1/models":
                return self.respond(404, {"detail": "Not Found"})
            if not self.is_authorized():
                return None
            data = [{"id": name, "root": root, "max_model_len": options.get("max_model_len", context)} for name, root in
                    (name.split("=") if "=" in name else (name, folder) for name in names)]  # fmt: skip
            return self.respond(200, {"object": "list", "data": data})

        def do_POST(self) -> None:
            request = self.read_json()
            if self.path != "/v1/completions":
                return self.respond(404, {"detail": "Not Found"})
            if not self.is_authorized():
                return None
            return self.respond(*completion_model.complete(request))

        def is_authorized(self) -> bool:
            key = options.get("key")
            if not key or self.headers["Authorization"] == f"Bearer {key}":
                return True
            self.respond(401, {"error": "Unauthorized"})
            return False

    serve_handler(Handler, ready)


def serve_as_sglang(ready: Connection, folder: str, options: dict[str, Any]) -> None:
    """Serve a model with transformers and the part of SGLang's `/generate` API that xtk uses.

    SGLang itself cannot be installed without a GPU. The API is that of its documentation and of its clients.
    Options: `prefix_ids` (list of token ids that are prepended to the tokens of a text).
    """
    import torch

    from xtk.models.causal_lm import load_causal_lm
    from xtk.models.resolver import ModelRef

    torch.set_num_threads(1)
    model = load_causal_lm(ModelRef(Path(folder)))
    context = model.config.max_position_embeddings
    completion_model = _CompletionModel(model, Path(folder), ["teacher"], {}, context)

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            card = {"id": "teacher", "object": "model", "owned_by": "sglang", "root": folder, "max_model_len": context}
            self.respond(200, {"object": "list", "data": [card]})

        def do_POST(self) -> None:
            request = self.read_json()
            if self.path != "/generate":
                return self.respond(404, {"detail": "Not Found"})
            ids = request.get("input_ids")
            if ids is None:
                ids = [
                    *options.get("prefix_ids", []),
                    *completion_model.tokenizer.encode([request["text"]])[0].ids.tolist(),
                ]
            if len(ids) >= context:
                return self.respond(
                    400, {"error": {"message": f"The input is longer than the context length {context}."}}
                )
            assert request["return_logprob"]
            assert request["logprob_start_len"] == request["sampling_params"]["max_new_tokens"] == 0
            with completion_model.lock:
                logprobs = completion_model.logprobs(ids)
            observed: list[Any] = [[None, ids[0], None]]
            observed += [[float(row[token]), token, None] for row, token in zip(logprobs[:-1], ids[1:], strict=True)]
            top_k = [row.topk(request["top_logprobs_num"]) for row in logprobs[:-1]]
            top = [None, *([[value, token, None] for value, token in zip(*map(list, (one.values.tolist(),
                   one.indices.tolist())), strict=True)] for one in top_k)]  # fmt: skip
            meta = {"input_token_logprobs": observed, "input_top_logprobs": top, "prompt_tokens": len(ids)}
            return self.respond(200, {"text": "", "meta_info": meta})

    serve_handler(Handler, ready)


class _CompletionModel:
    def __init__(self, model: Any, folder: Path, names: list[str], options: dict[str, Any], context: int) -> None:
        from xtk.text.tokenizer import Tokenizer

        self.model, self.names, self.options, self.context = model, names, options, context
        self.tokenizer = Tokenizer(folder)
        self.lock = threading.Lock()

    def complete(self, request: dict[str, Any]) -> tuple[int, Any]:
        prompt, K = request["prompt"], request.get("prompt_logprobs", 0)
        if request["model"] not in [name.partition("=")[0] for name in self.names]:
            return 404, _error_body(404, f"The model `{request['model']}` does not exist.")
        max_logprobs = self.options.get("max_logprobs", 20)
        if max_logprobs < K:
            return 400, _error_body(
                400, f"Requested prompt logprobs of {K}, which is greater than max allowed: {max_logprobs}"
            )
        ids = self.tokenizer.encode([prompt])[0].ids.tolist() if isinstance(prompt, str) else prompt
        if len(ids) > self.context:
            message = f"This model's maximum context length is {self.context} tokens. However, your prompt contains"
            return 400, _error_body(400, f"{message} {len(ids)} input tokens")
        if len(ids) == self.context:
            return 400, _error_body(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        with self.lock:
            logprobs = self.logprobs(ids)
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        if not self.options.get("no_prompt_logprobs"):
            pairs = zip(logprobs[:-1], ids[1:], strict=True)
            choice["prompt_logprobs"] = [None, *(_position_entry(row, token, K) for row, token in pairs)]
        if request.get("return_token_ids") and not self.options.get("no_ids"):
            choice["prompt_token_ids"] = ids
        if "logprobs" in request:
            choice["logprobs"] = self.generated_logprobs(logprobs[-1], request)
        return 200, {"object": "text_completion", "model": request["model"], "choices": [choice]}

    def generated_logprobs(self, row: Any, request: dict[str, Any]) -> dict[str, Any]:
        (token,) = request["allowed_token_ids"]
        assert request["return_tokens_as_token_ids"]
        assert request["max_tokens"] == 1
        if self.options.get("processed"):
            row = row.clone().fill_(-float("inf"))
            row[token] = 0.0
        entry = _position_entry(row, token, request["logprobs"])
        top_logprobs = {f"token_id:{number}": value["logprob"] for number, value in entry.items()}
        return {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [top_logprobs[f"token_id:{token}"]],
            "top_logprobs": [top_logprobs],
            "text_offset": [0],
        }

    def logprobs(self, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)


def _error_body(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}


def _position_entry(row: Any, token: int, K: int) -> dict[str, dict[str, Any]]:
    """Return the entry of a position as vLLM writes it: the observed token first, then the other ones of the top K."""
    values, ids = row.topk(K)
    pairs = dict([(token, float(row[token])), *zip(ids.tolist(), values.tolist(), strict=True)])
    return {
        str(number): {
            "logprob": max(value, MIN_LOGPROB),
            "rank": int((row >= value).sum()),
            "decoded_token": '\\"{},:1',
        }
        for number, value in pairs.items()
    }


def serve_generation_as_vllm(ready: Connection, folder: str, options: dict[str, Any]) -> None:
    """Serve generation and weight updates with transformers and the API of vLLM's server.

    Options: `port`; `keeps_head` (of a tied model: weight updates do not change its output head); `dies_at` (the
    process ends at the completion request of this number); `seconds` (duration of one completion); `shift` (nats,
    added to each log-probability after the first weight update); `unversioned` (has no version of its weights).
    """
    import torch
    from safetensors.torch import load_file

    from xtk.models.causal_lm import load_causal_lm
    from xtk.models.resolver import ModelRef

    torch.set_num_threads(1)
    model = load_causal_lm(ModelRef(Path(folder)))
    if options.get("keeps_head"):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    context = model.config.max_position_embeddings
    completion_model = _CompletionModel(model, Path(folder), ["student"], {}, context)
    bytes_of = completion_model.tokenizer.vocabulary.bytes_of
    letter_tokens = [token for token in range(5, len(completion_model.tokenizer)) if bytes_of(token).strip().isalpha()]
    state: dict[str, Any] = {"version": "default", "completions": 0, "updates": 0}

    def reload(path: str) -> None:
        weights: dict[str, Any] = {}
        for file in Path(path).glob("*.safetensors"):
            weights |= load_file(file)
        if options.get("keeps_head"):
            weights.pop("lm_head.weight", None)
        with completion_model.lock:
            model.load_state_dict(weights, strict=False)
        state["updates"] += 1

    def sample(row: Any, seed: int) -> int:
        """Return a sampled token that consists of letters; its log-probability is still relative to all tokens."""
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        return letter_tokens[int(torch.multinomial(row[letter_tokens].exp(), 1, generator=generator))]

    def generate(request: dict[str, Any]) -> tuple[int, Any]:
        state["completions"] += 1
        if state["completions"] == options.get("dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(options.get("seconds", 0))
        prompt = request["prompt"]
        ids = completion_model.tokenizer.encode([prompt])[0].ids.tolist() if isinstance(prompt, str) else list(prompt)
        count, values = len(ids), []
        for _ in range(request["max_tokens"]):
            with completion_model.lock:
                row = completion_model.logprobs(ids)[-1][: len(completion_model.tokenizer)]
            ids.append(
                int(row.argmax()) if request.get("temperature") == 0 else sample(row, request.get("seed", 0) + len(ids))
            )
            values.append(float(row[ids[-1]]) + (options.get("shift", 0.0) if state["updates"] else 0.0))
            if ids[-1] in request.get("stop_token_ids", ()):
                break
        logprobs = {"token_logprobs": values, "top_logprobs": [{}] * len(values)}
        choice = {"index": 0, "token_ids": ids[count:], "prompt_token_ids": ids[:count], "logprobs": logprobs}
        return 200, {"choices": [choice]}

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                return self.respond(200, {"data": [{"id": "student", "root": folder, "max_model_len": context}]})
            if self.path == "/weight_info" and not options.get("unversioned"):
                return self.respond(200, {"weight_version": state["version"]})
            return self.respond(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            request = self.read_json()
            if self.path == "/v1/completions":
                return self.respond(*generate(request))
            if self.path == "/collective_rpc":
                reload(request["kwargs"]["weights_path"])
                return self.respond(200, {"results": [None]})
            if self.path == "/reset_prefix_cache":
                return self.respond(200, {"success": True})
            if self.path == "/update_weight_version" and not options.get("unversioned"):
                state["version"] = request["new_version"]
                return self.respond(200, {"success": True, "new_version": state["version"]})
            return self.respond(404, {"detail": "Not Found"})

    serve_handler(Handler, ready, options.get("port", 0))


def serve_faulty_proxy(ready: Connection, upstream: str) -> None:
    """Forward requests, and apply the fault of `ServerProcess.inject_fault` to those whose prompt is token ids."""
    host = urlsplit(upstream).netloc
    state: dict[str, Any] = {"kind": "", "times": 0, "after": 0}
    counts = {"requests": 0, "running": 0, "max_running": 0, "connections": 0}
    lock = threading.Lock()

    def next_fault() -> str:
        if state["after"] > 0:
            state["after"] -= 1
            return ""
        if state["times"] == 0:
            return ""
        state["times"] -= 1
        return state["kind"]

    class Proxy(JsonHandler):
        def setup(self) -> None:
            super().setup()
            with lock:
                counts["connections"] += 1

        def do_GET(self) -> None:
            if self.path == "/fault":
                return self.respond(200, counts)
            return self.respond(*self.forward(None))

        def do_POST(self) -> None:
            request = self.read_json()
            if self.path == "/fault":
                state.update(request)
                counts.update(dict.fromkeys(counts, 0))
                return self.respond(200, {})
            if isinstance(request.get("prompt"), str):
                return self.respond(*self.forward(request))
            with lock:
                kind = next_fault()
                counts["requests"] += 1
                counts["running"] += 1
                counts["max_running"] = max(counts["max_running"], counts["running"])
            try:
                self.respond_with_fault(kind, request)
            finally:
                with lock:
                    counts["running"] -= 1
            return None

        def respond_with_fault(self, kind: str, request: Any) -> None:
            if kind.isdecimal():
                headers = {"Retry-After": "1"} if kind == "429" else {}
                self.respond(int(kind), {"error": {"message": "made by the test"}}, headers)
            elif kind == "hang":
                time.sleep(600)
            elif kind == "close":
                self.drop_connection()
            else:
                status, raw = self.forward(request)
                self.send_corrupted(kind, status, raw)

        def send_corrupted(self, kind: str, status: int, raw: bytes) -> None:
            if kind in ("cut", "drip"):
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                for at in range(len(raw) // 2):
                    self.wfile.write(raw[at : at + 1])
                    if kind == "drip":
                        time.sleep(0.05)
                self.drop_connection()
            elif kind == "html":
                self.respond(200, b"<html>a gateway says hello</html>")
            else:
                self.respond(status, CORRUPTIONS[kind](raw) if kind else raw)

        def drop_connection(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def forward(self, request: Any) -> tuple[int, bytes]:
            connection = HTTPConnection(host, timeout=120)
            body = None if request is None else json.dumps(request)
            headers = {name: value for name, value in self.headers.items() if name == "Authorization"}
            headers["Content-Type"] = "application/json"
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    serve_handler(Proxy, ready)


def _edit_logprobs(edit: Callable[[list[Any]], Any]) -> Callable[[bytes], bytes]:
    def corrupt(raw: bytes) -> bytes:
        response = json.loads(raw)
        entries = response["choices"][0]["prompt_logprobs"]
        edit(entries)
        return json.dumps(response).encode()

    return corrupt


def _last_entry(entries: list[Any]) -> dict[str, Any]:
    return list(entries[-1].values())[-1]


def _replace_token_id(entries: list[Any]) -> None:
    entries[-1] = {str((int(number) + 1) % 400): value for number, value in entries[-1].items()}


CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "nan": lambda raw: re.sub(rb'"logprob": ?[^,}]+', b'"logprob": NaN', raw),
    "null": _edit_logprobs(lambda entries: _last_entry(entries).update(logprob=None)),
    "text": _edit_logprobs(lambda entries: _last_entry(entries).update(logprob="-1.5")),
    "no-entry": _edit_logprobs(lambda entries: entries.__setitem__(-1, None)),
    "short": _edit_logprobs(lambda entries: entries.pop()),
    "few": _edit_logprobs(lambda entries: [entries[-1].pop(key) for key in list(entries[-1])[1:3]]),
    "other-token": _edit_logprobs(_replace_token_id),
    "huge-id": _edit_logprobs(lambda entries: entries[-1].update({"9" * 30: entries[-1].pop(list(entries[-1])[-1])})),
    "logits": _edit_logprobs(lambda entries: [one.update(logprob=one["logprob"] + 9) for one in entries[-1].values()]),
    "minus-infinity": _edit_logprobs(lambda entries: next(iter(entries[-1].values())).update(logprob=MIN_LOGPROB)),
    "list": lambda raw: b"[]",
    "empty": lambda raw: b"",
    "no-choices": lambda raw: b'{"choices": []}',
}
