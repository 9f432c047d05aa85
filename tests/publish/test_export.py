"""`xtk export`: the weights of a run, written as the files that other libraries load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_inputs
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtk_processes import run_xtk

from xtk.errors import CorruptError, XtkError
from xtk.evaluation.evaluation_result_files import EvaluationResult, add_evaluation_table
from xtk.publish.student_export import ExportConfig, export_student, size_in_bytes
from xtk.runs.checkpoint import copy_tokenizer_files
from xtk.runs.folder import file_entries, write_run_manifest
from xtk.runs.sharded_state import ShardedStateReader
from xtk.text.tokenizer import Tokenizer

IDS = torch.arange(3, 40)[None]
TEMPLATE = (
    "{% for message in messages %}<|im_end|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}"
)
TRAINING = ["--loss", "ce", "--save-steps", 2, "--logging-steps", 1, "--learning-rate", 1e-2,
            "--per-device-train-batch-size", 4, "--max-steps"]  # fmt: skip


def rewrite_manifest(run: Path) -> None:
    """Rewrite the manifest of a finished run for the files that the run contains now."""
    manifest = json.loads((run / "xtk.json").read_text())
    content = {key: value for key, value in manifest.items() if key not in ("files", "folders", "checksum")}
    write_run_manifest(run, content, file_entries(run, manifest["files"]))


def test_sizes_are_parsed_as_bytes():
    for text, size in (("1B", 1), ("60KB", 60_000), ("60kib", 61_440), ("1.5GiB", 3 << 29), ("2TB", 2 * 10**12)):
        assert size_in_bytes(text) == size
    for text in ("huge", "iB", "0GB", "5", "-1GB", "1e3KB", "5PB"):
        with pytest.raises(XtkError, match="is not a size"):
            size_in_bytes(text)


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def tied(tmp_path_factory, corpus) -> Path:
    """A finished run of a student with tied embeddings, chat templates, and an end-of-turn token other than eos."""
    root = tmp_path_factory.mktemp("exports")
    student = small_inputs.make_teacher(root / "student")
    (student / "chat_template.jinja").write_text(TEMPLATE)
    (student / "additional_chat_templates").mkdir()
    (student / "additional_chat_templates" / "tool_use.jinja").write_text(f"{{{{ tools }}}}{TEMPLATE}")
    tokenizer_config = json.loads((student / "tokenizer_config.json").read_text())
    (student / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "eos_token": "<|endoftext|>"}))
    run_xtk("distill", student, corpus, *TRAINING, 3, "-o", root / "run")
    return root / "run"


def test_a_single_chat_template_is_copied_byte_by_byte(tmp_path):
    source, folder = (tmp_path / name for name in ("source", "copy"))
    source.mkdir()
    folder.mkdir()
    (source / "chat_template.jinja").write_bytes(b"{% for m in messages %}\r\n{{ m.content }}{% endfor %}\r\n")
    copy_tokenizer_files(source, folder)
    assert (folder / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()


def test_a_second_chat_template_is_kept(tied, tmp_path):
    run_xtk("export", tied, "-o", tmp_path / "out")
    for folder in (tied, tmp_path / "out"):
        assert Tokenizer(folder).template_fingerprint == Tokenizer(tied.parent / "student").template_fingerprint


def test_export_writes_the_student_in_files_that_transformers_loads(tied, tmp_path):
    results = tmp_path / "results.json"
    results.write_text(
        json.dumps({"model": "a", "data": "test.txt", "bits_per_byte": 1.25, "bytes": 900}) + "\n"
        + json.dumps({"model": "a", "results": {"gsm8k": {"exact_match,none": 0.5, "exact_match_stderr,none": 0.05}}})
    )  # fmt: skip
    out = tmp_path / "deep" / "out"
    command = ["export", tied, "-o", out, "--max-shard-size", "60KB", "--evaluation", results, "--json"]
    report = json.loads(run_xtk(*command).stdout)
    assert torch.equal(logits_of(out), logits_of(tied))

    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # all files have the same permissions
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) == report["shards"] > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {path.name for path in shards}
    assert "lm_head.weight" not in index
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report["parameters"] == sum(one.numel() for one in model.parameters())
    assert report["bytes"] == sum(path.stat().st_size for path in shards)

    tokenizer = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "Hi"}]
    expected_prompt = "<|im_end|>user\nHi<|im_end|>\n<|im_end|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected_prompt
    stop_ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert (
        json.loads((out / "generation_config.json").read_text())["eos_token_id"] == stop_ids == report["eos_token_ids"]
    )

    card = (out / "README.md").read_text()
    assert "| test.txt | bits_per_byte | 1.2500 |\n| gsm8k | exact_match | 0.5000 ± 0.0500 |" in card
    assert card.index("## Metrics") < card.index("## Evaluation") < card.index("## Recipe")
    assert str(tmp_path) not in card
    assert str(tied) not in (out / "xtk.json").read_text()

    # The same command again finds the export. Another request is refused and replaces the export only with --force.
    # No temporary files remain.
    modified_times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    table = add_evaluation_table(
        "## Recipe\n", [EvaluationResult("a", "t", "m", 0.5), EvaluationResult("b", "t", "m", 1.0, 0.25)]
    )
    assert "| data | metric | a | b |\n| --- | --- | --- | --- |\n| t | m | 0.5000 | 1.0000 ± 0.2500 |\n" in table
    assert json.loads(run_xtk(*command).stdout) == report
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == modified_times
    refused = run_xtk("export", tied, "-o", out, "--dtype", "bfloat16", code=1).stderr
    assert "an export with other options or inputs" in refused
    assert "dtype, max_shard_size, evaluation" in refused
    run_xtk("export", tied, "-o", tmp_path / "small", "--max-shard-size", "60KiB")
    assert torch.equal(logits_of(tmp_path / "small"), logits_of(tied))
    assert run_xtk("export", "-", "-o", out, "--dtype", "bfloat16", "--force", stdin=f"{tied}\n").stdout == f"{out}\n"
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    torch.testing.assert_close(logits_of(out), logits_of(tied), rtol=0.05, atol=0.05)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "out.replaced-1"]


def test_export_keeps_the_models_special_stop_tokens_and_drops_text_tokens(tied, tmp_path):
    run = Path(shutil.copytree(tied, tmp_path / "run"))
    tokenizer = json.loads((run / "tokenizer.json").read_text())
    added_token = {
        **tokenizer["added_tokens"][0],
        "id": (end_of_message_id := len(tokenizer["model"]["vocab"])),
        "content": "<|eom_id|>",
    }
    (run / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], added_token]})
    )
    for name, eos_ids in (("config.json", end_of_message_id), ("generation_config.json", [1, 2])):
        (run / name).write_text(json.dumps({**json.loads((run / name).read_text()), "eos_token_id": eos_ids}))
    rewrite_manifest(run)
    report = export_student(ExportConfig(run), tmp_path / "out", force=False)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert written == report["eos_token_ids"] == [0, 1, end_of_message_id]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_export_with_a_missing_file_is_refused_unless_forced(tied, tmp_path, name):
    out = tmp_path / "out"
    export_student(ExportConfig(tied), out, force=False)
    assert export_student(ExportConfig(tied), out, force=False)["kind"] == "exported-student"
    (out / name).unlink()
    with pytest.raises(CorruptError, match="listed in the manifest, but it is missing") as raised:
        export_student(ExportConfig(tied), out, force=False)
    assert raised.value.where == str(out / name)
    export_student(ExportConfig(tied), out, force=True)
    assert (out / name).is_file()


def test_export_to_a_symlink_keeps_the_link_and_writes_to_its_target(tied, tmp_path):
    (tmp_path / "disk" / "target").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "target")
    for force in (False, True):
        export_student(ExportConfig(tied, dtype="bfloat16" if force else ""), tmp_path / "link", force=force)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "target" / "model.safetensors").is_file()
        assert sorted(path.name for path in (*tmp_path.iterdir(), *(tmp_path / "disk").iterdir())) == [
            "disk",
            "link",
            "target",
            *(["target.replaced-1"] if force else []),
        ]


@pytest.mark.slow
def test_checkpoint_with_an_adapter_is_merged_like_the_finished_student(pair, cache, tmp_path):
    """Checkpoint 2 of a run of four steps is compared with the finished student of a run of two steps."""
    training = ["--lora-r", 4, "--lora-modules-to-save", "lm_head", "--lr-scheduler-type", "constant"]
    common = ["distill", pair.student, cache, *TRAINING]
    run_xtk(*common, 4, *training, "--warmup-steps", 1, "-o", tmp_path / "long")
    run_xtk(*common, 2, *training, "--warmup-steps", 1, "-o", tmp_path / "short")
    run_xtk("export", tmp_path / "long", "--checkpoint", 2, "-o", tmp_path / "out")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "short"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    assert not torch.equal(logits_of(tmp_path / "out"), logits_of(tmp_path / "long"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Training | 2 steps of 4 documents |" in card
    assert "text alone" not in card


def test_export_of_a_checkpoint_uses_the_averaged_weights(pair, corpus, tmp_path):
    run_xtk("distill", pair.student, corpus, *TRAINING, 3, "--ema-decay", 0.5, "-o", tmp_path / "run")
    run_xtk("export", tmp_path / "run", "--checkpoint", 2, "--dtype", "float16", "-o", tmp_path / "out")
    trainer_state = ShardedStateReader(sorted((tmp_path / "run" / "checkpoint-2" / "trainer").iterdir()))
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, trainer_state.read_unsharded(f"ema.{name}").half())


def test_invalid_export_requests_are_refused_and_leave_no_files(tied, pair, tmp_path, monkeypatch):
    unfinished = Path(shutil.copytree(tied, tmp_path / "unfinished"))
    (unfinished / "xtk.json").unlink()
    large = Path(shutil.copytree(tied, tmp_path / "large"))
    weights = load_file(large / "model.safetensors")
    weights["model.norm.weight"] += 1e6
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    rewrite_manifest(large)
    damaged = Path(shutil.copytree(tied, tmp_path / "damaged"))
    first, *others = (damaged / "metrics.jsonl").read_text().splitlines(keepends=True)
    (damaged / "metrics.jsonl").write_text(first[: len(first) // 2] + "\n" + "".join(others))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("notes")
    (tmp_path / "empty.json").write_text("{}")
    names_before = sorted(path.name for path in tmp_path.iterdir())
    for message, run, options in (
        ("this is not a run of xtk distill", pair.student, {}),
        ("the run to export is not finished.*, or use --checkpoint 2", unfinished, {}),
        ("not a JSON object.*metrics.jsonl, line 1", damaged, {}),
        ("use --checkpoint with one of 2", tied, {"checkpoint": 7}),
        ("did you mean bfloat16", tied, {"dtype": "bfloat"}),
        ("--max-shard-size 'huge' is not a size", tied, {"max_shard_size": "huge"}),
        ("NaN or infinite in float16.*--dtype bfloat16", large, {"dtype": "float16"}),
        ("the file of evaluation results has no result", tied, {"evaluations": (tmp_path / "empty.json",)}),
    ):
        with pytest.raises(XtkError, match="(?s)" + message):
            export_student(ExportConfig(run, **options), tmp_path / "out", force=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(XtkError, match="the working directory or a mount point"):
        export_student(ExportConfig(tied), Path(), force=False)
    (tmp_path / "here").rmdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(XtkError, match="files that xtk did not write"):
        export_student(ExportConfig(tied), tmp_path / "mine", force=False)
    for message, output in (
        ("this path is a file", "empty.json"),
        ("use another -o, outside of the run", tied / "x"),
    ):
        with pytest.raises(XtkError) as raised:
            export_student(ExportConfig(tied), tmp_path / output, force=True)
        assert message in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == names_before


def test_push_to_hub_without_repository_name_or_token_writes_nothing(tied, tmp_path):
    for message, name in (
        ("--push-to-hub 'mine' is not a repository name", "mine"),
        ("need an access token, and none was found", "me/mine"),
    ):
        command = ["export", tied, "-o", tmp_path / "out", "--push-to-hub", name]
        done = run_xtk(*command, code=1, env={"HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "none")})
        assert message in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "out").exists()
