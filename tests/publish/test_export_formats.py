"""`xtk export` of adapters over 4-bit weights and of custom model code, and the upload to the Hugging Face Hub."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xtk_processes import run_xtk

from xtk.errors import XtkError
from xtk.publish.student_export import upload_to_hub

TRAINING = ["--loss", "ce", "--max-steps", 2, "--learning-rate", 1e-2, "--per-device-train-batch-size", 4]
CUSTOM_MODEL_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *arguments, **named):
        return super().forward(*arguments, **named)
"""


@pytest.fixture(scope="module")
def run(pair, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "run"
    run_xtk("distill", pair.student, corpus, *TRAINING, "-o", folder)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft reads this attribute
def test_adapter_over_4bit_weights_is_merged_into_the_unquantized_ones(pair, corpus, tmp_path):
    pytest.importorskip("bitsandbytes", reason="there is no bitsandbytes")
    from peft import PeftModel

    run_xtk("distill", pair.student, corpus, *TRAINING, "--lora-r", 4, "--load-in-4bit", "-o", tmp_path / "run")
    stderr = run_xtk("export", tmp_path / "run", "-o", tmp_path / "out").stderr
    assert "merged into the unquantized weights" in stderr
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    ids = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(pair.student)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "run"))
    with torch.no_grad():
        expected = adapted(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        with adapted.disable_adapter():
            before = adapted(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-3
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.slow
def test_custom_model_code_is_exported_only_with_trust_remote_code(pair, corpus, tmp_path):
    student = Path(shutil.copytree(pair.student, tmp_path / "student"))
    (student / "modeling_own.py").write_text(CUSTOM_MODEL_CODE)
    config = json.loads((student / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (student / "config.json").write_text(json.dumps(config))
    run_xtk("distill", student, corpus, *TRAINING, "--trust-remote-code", "-o", tmp_path / "run")
    export = ["export", tmp_path / "run", "-o", tmp_path / "out"]
    refused = run_xtk(*export, code=1)
    assert "--trust-remote-code" in refused.stderr
    assert not (tmp_path / "out").exists()
    run_xtk(*export, "--trust-remote-code")
    assert (tmp_path / "out" / "modeling_own.py").read_text() == CUSTOM_MODEL_CODE
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["auto_map"]["AutoModelForCausalLM"].endswith("modeling_own.OwnForCausalLM")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "run"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    evaluated = run_xtk("evaluate", tmp_path / "out", corpus, "--trust-remote-code", "--json")
    assert json.loads(evaluated.stdout)["bits_per_byte"] > 0


class Hub(BaseHTTPRequestHandler):
    """A server with the part of the Hub's API that an upload of small files uses."""

    def do_POST(self) -> None:
        """Respond to a request and store the files in it."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.received_requests.append((self.path, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != "Bearer hf_known":
            self._send_json(401, {"error": "who is this"})
        elif self.path == "/api/repos/create":
            self._send_json(
                200, {"url": f"{self.address()}/{json.loads(body)['organization']}/{json.loads(body)['name']}"}
            )
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]  # fmt: skip
            self._send_json(200, {"files": files})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            files_in_commit = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines
                               if line.get("key") == "file"}  # fmt: skip
            self.server.received_files.update(files_in_commit)  # type: ignore[attr-defined]
            url = f"{self.address()}/me/mine/commit/1"
            self._send_json(200, {"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})

    def do_GET(self) -> None:
        """Return the repository information that the library requests before an upload."""
        self._send_json(200, {"sha": "0" * 40, "id": "me/mine", "siblings": []})

    def address(self) -> str:
        """Return the URL of this server."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def _send_json(self, code: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.received_requests, server.received_files = [], {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_upload_sends_every_file_of_the_export_and_reports_a_refusal(run, hub, tmp_path, monkeypatch):
    out, endpoint = tmp_path / "out", f"http://127.0.0.1:{hub.server_address[1]}"
    run_xtk("export", run, "-o", out)
    for name, value in (("ENDPOINT", endpoint), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    with pytest.raises(XtkError, match="the upload to the Hugging Face Hub failed") as raised:
        upload_to_hub(out, "me/mine")
    assert str(out) in str(raised.value.hint)
    assert hub.received_files == {}
    environment = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_known"}
    done = run_xtk("export", run, "-o", out, "--push-to-hub", "me/mine", fresh=True, env=environment)
    assert done.stdout == f"{out}\n"
    assert f"{endpoint}/me/mine" in done.stderr
    assert "hf_known" not in done.stderr
    assert hub.received_files == {path.name: path.read_bytes() for path in out.iterdir()}
