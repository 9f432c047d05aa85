"""Every file, key, column and metric that xtk writes is documented in artifacts.md or metrics.md.

Small artifacts of every kind are written once. Each of their names must be in backticks in the section of its artifact.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors import safe_open
from xtk_processes import run_xtk

from xtk.cache.reader import TeacherCache
from xtk.cache.writer import _unfinished_marker_content
from xtk.data.record_to_document import RECORD_FIELDS
from xtk.losses import LOSSES
from xtk.projection.token_categories import CATEGORIES
from xtk.runs.metrics_file import read_metrics
from xtk.text.alignment_statistics import SPAN_KINDS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NAMES = ["Anna", "Bert", "Clara", "Dora"]
# The keys below these are names that a user or a model chooses: files, tokens, options, tasks.
FREE_KEYS = {
    "files", "folders", "special_tokens", "metrics", "rewards", "categories", "results", "span_kinds",
    "rows_by_entries", "trainer", "adapter", "identity", "recipe", "sharded_state", "tensors_by_dtype", "messages",
    "request", "varied_options",
}  # fmt: skip
TRAINING = ["--learning-rate", "1e-3", "--logging-steps", "1", "--per-device-train-batch-size", "4"]


def backticked(page: str, heading: str = "") -> set[str]:
    """Return the words in backticks in a page, or in one of its sections with the subsections."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    if heading:
        level = len(re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)[1])
        text = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
        text = re.split(rf"^#{{1,{level}}} ", text, flags=re.MULTILINE)[0]
    return set(re.findall(r"`([^`\n]+)`", text))


def all_keys(value: Any) -> set[str]:
    """Return the keys of a JSON value at all depths, except those below FREE_KEYS."""
    if isinstance(value, Mapping):
        keys = set(value)
        for key, item in value.items():
            if key not in FREE_KEYS:
                keys |= all_keys(item)
        return keys
    return set().union(*map(all_keys, value)) if isinstance(value, list) else set()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def printed_records(*command: object, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_xtk(*command, **options).stdout.splitlines()]


def safetensors_names(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Return the xtk header and the tensor names of a safetensors file."""
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["xtk"]), set(file.keys())


def undocumented(found: Iterable[str], page: str, heading: str = "") -> set[str]:
    return set(found) - backticked(page, heading)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fields")
    rows = [
        {"prompt": f"{name} has {at} apples and", "completion": f" gives {at} to Ida.", "answer": str(at),
         "weight": 1 + at, "route": "teacher"}
        for at, name in enumerate(NAMES)
    ]  # fmt: skip
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def rollouts(pair, folder) -> tuple[Path, list[dict[str, Any]]]:
    """Return the file of rollouts with candidate ids, and the records that the command printed."""
    records = printed_records(
        "rollout", pair.student, folder / "prompts.jsonl", "--num-generations", 2, "--max-completion-length", 8,
        "--top-logprobs", 2, "--reward", "regex:pattern=a", "-o", folder / "r.jsonl", "--json",
    )  # fmt: skip
    return folder / "r.jsonl", records


@pytest.fixture(scope="module")
def caches(pair, cache, rollouts, folder) -> dict[str, Path]:
    """Return caches of both codecs, one of rollouts with samples and all optional columns, and a merged cache."""
    candidate_columns = {"candidate_ids", "rollout_checksum"}  # student token ids; without them the checksum fails
    lines = [
        {key: value for key, value in line.items() if key not in candidate_columns} for line in read_jsonl(rollouts[0])
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_xtk(
        "cache-teacher", pair.teacher, folder / "texts.jsonl", "--support", "top-k+sample", "--precision", "float32",
        "--weight-column", "weight", "--route-column", "route", "-o", folder / "rollouts",
    )  # fmt: skip
    run_xtk("cache", "merge", cache, cache, "-o", folder / "merged")
    return {"packed": cache, "raw": folder / "rollouts", "merged": folder / "merged"}


# --- caches


@pytest.mark.slow
def test_manifest_keys_of_caches_are_documented(caches):
    found: set[str] = set()
    for path in caches.values():
        manifest = json.loads((path / "manifest.json").read_text())
        found |= all_keys(manifest) | {re.sub(r"-[0-9a-f]{16}", "-HASH", name) for name in manifest["files"]}
    marker = json.loads(_unfinished_marker_content(TeacherCache(caches["raw"]).header))
    assert not undocumented(found | all_keys(marker), "artifacts.md", "Teacher cache")


@pytest.mark.slow
def test_files_and_columns_of_caches_are_documented(caches):
    found: set[str] = set()
    for path in caches.values():
        files = {file.name for file in path.iterdir()}
        found |= {re.sub(r"-[0-9a-f]{16}", "-HASH", name) for name in files if not name.startswith("shard-")}
        for file in sorted(path.glob("*.arrow")):
            reader = pa.ipc.open_file(file.read_bytes())
            found |= {field.name for field in reader.schema} | {key.decode() for key in reader.schema.metadata or ()}
            if file.name.startswith("shard-"):
                batch, seal = reader.get_batch_with_custom_metadata(0)
                found |= {field.name for field in reader.schema.field("segments").type.value_type}
                found |= set(json.loads(seal[b"xtk"]))
                found |= {key for text in batch.column("conversation").to_pylist() if text for key in json.loads(text)}
    assert {"sampled_tokens", "weight", "route", "first_document", "num_bytes"} <= found
    assert not undocumented(found, "artifacts.md", "Teacher cache")


# --- projections


@pytest.mark.slow
def test_projection_header_and_tensors_are_documented(pair, projection, corpus, folder):
    run_xtk("prune-projection", projection, "--top-k", 2, "-o", folder / "pruned")
    build = ("build-projection", pair.student, pair.teacher, "--method", "cooccurrence", "--corpus", corpus)
    run_xtk(*build, "-o", folder / "cooccurrence")
    paths = [projection, folder / "pruned", folder / "cooccurrence"]
    found: set[str] = set()
    for path in paths:
        header, tensors = safetensors_names(path)
        found |= all_keys(header) | tensors
        for name, statistics in header["audit"].get("categories", {}).items():
            assert name in CATEGORIES
            found |= set(statistics)
    assert {"unmapped_mass", "composed", "mapped"} <= found
    assert not undocumented(found, "artifacts.md", "Projection")


# --- runs


@pytest.fixture(scope="module")
def run_of_caches(pair, cache, folder) -> Path:
    """Return a run with two teachers, held-out caches, a LoRA adapter, EMA weights and checkpoints."""
    output = folder / "run"
    shutil.copytree(cache, folder / "again")
    run_xtk(
        "distill", pair.student, cache, folder / "again", "--loss", "ce", "--loss", "byte-kl", "--max-steps", 3,
        "--scale-kd-to", "ce", "--teacher-weights", "ce:alpha=1", "--eval-data", cache,
        "--eval-data", folder / "again", "--eval-steps", 1, "--save-steps", 1, "--save-total-limit", 3, "--lora-r", 2,
        "--ema-decay", 0.5, "--report-to", "tensorboard", *TRAINING, "-o", output,
    )  # fmt: skip
    return output


@pytest.fixture(scope="module")
def run_on_policy(pair, folder) -> Path:
    """Return an on-policy run with a teacher, a reward, an environment, checkpoints and evaluated tasks.

    Early stopping makes it write its best weights.
    """
    output = folder / "on-policy"
    (folder / "friend.py").write_text(FRIEND)
    run_xtk(
        "distill-on-policy", pair.student, folder / "prompts.jsonl", "--teacher", f"{pair.teacher}:top_k=16",
        "--loss", "policy-gradient", "--reward", "regex:pattern=a", "--num-generations", 2, "--max-steps", 4,
        "--steps-per-generation", 2, "--max-completion-length", 8, "--save-steps", 2, "--eval-steps", 2,
        "--eval-data", folder / "prompts.jsonl", "--early-stopping-patience", 5, "--stop", "a", "--environment",
        f"{folder / 'friend.py'}:Friend", "--max-turns", 2,
        "--eval-tasks", f"{folder / 'prompts.jsonl'}:reward=regex:pattern=a,num_generations=2,temperature=1,"
        "max_completion_length=4", *TRAINING, "-o", output,
    )  # fmt: skip
    return output


FRIEND = """
class Friend:
    def reset(self, record):
        return None

    def step(self, text):
        return " Bert, ", False
"""


@pytest.mark.slow
def test_files_of_run_folders_are_documented(run_of_caches, run_on_policy):
    model_files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md",
                   "tokenizer_config.json"}  # fmt: skip
    found: set[str] = set()
    for path in (run_of_caches, run_on_policy):
        names = {f"{one.name}/" if one.is_dir() else one.name for one in path.iterdir()} - model_files
        found |= {re.sub(r"checkpoint-\d+", "checkpoint-N", name) for name in names}
    assert {"adapter/", "trackers/", "checkpoint-N/", "rollouts.jsonl", "metrics.jsonl"} <= found
    assert not undocumented(found, "artifacts.md", "Run folder")


@pytest.mark.slow
def test_recipes_and_manifests_of_runs_are_documented(run_of_caches, run_on_policy, folder):
    run_xtk("export", run_of_caches, "-o", folder / "export")
    found: set[str] = set()
    manifests = [*run_of_caches.rglob("xtk.json"), *run_on_policy.rglob("xtk.json"), folder / "export" / "xtk.json"]
    kinds = set()
    for path in manifests:
        content = json.loads(path.read_text())
        kinds.add(content["kind"])
        found |= all_keys(content) | all_keys(content.get("request", {}))
    assert kinds == {"student", "checkpoint", "exported-student"}
    for run in (run_of_caches, run_on_policy):
        recipe = json.loads((run / "recipe.json").read_text())
        options = set(recipe) - {"kind", "version", "identity"}
        assert {"loss", "max_steps"} <= options
        found |= {"kind", "version", "identity"} | set(recipe["identity"]["inputs"])
        found |= {key for key in recipe["identity"] if key not in options and key != "losses"}
    assert not undocumented(found - IDENTITY_OF_OPTIONS, "artifacts.md", "Run folder")


# Values of options that the identity stores under the names of the options in the code.
IDENTITY_OF_OPTIONS = {"on_policy"}


@pytest.mark.slow
def test_trainer_state_of_checkpoints_is_documented(run_of_caches):
    found: set[str] = set()
    (checkpoint, *_) = sorted(run_of_caches.glob("checkpoint-*"))
    for path in (checkpoint / "trainer").iterdir():
        header, tensors = safetensors_names(path)
        found |= set(header) | {key for one in header["sharded_state"].values() for key in one}
        found |= {name.partition(".")[0] for name in tensors}
    assert {"ema", "exp_avg", "random"} <= found
    assert not undocumented(found, "artifacts.md", "Trainer state")


@pytest.mark.slow
def test_every_metric_is_documented(run_of_caches, run_on_policy):
    found: set[str] = set()
    for run in (run_of_caches, run_on_policy):
        for record in read_metrics(run / "metrics.jsonl"):
            found |= set(record)
    assert {"kd_scale", "distillation_loss", "importance_ratio", "rollout_environment_token_fraction"} <= {
        name.partition("/")[0] for name in found
    }
    names = set()
    for name in found:
        if name.startswith("eval_prompts/"):
            names.add(re.sub(r"@\d+", "@n" if "avg" in name else "@k", name.replace("eval_prompts/", "eval_NAME/")))
        elif name.partition("/")[0].removeprefix("eval_") not in {*LOSSES} - {"ce"}:
            names.add(re.sub("/.*", "/TEACHER", name) if name.startswith(("teacher_", "eval_teacher_")) else name)
    names = {name if name in ("teacher_weight/TEACHER", "eval_teacher_weight/TEACHER") else
             re.sub("/.*", "/REGION", name) if name.startswith("region_") else
             name if name.startswith("eval_NAME/") else name.partition("/")[0] for name in names}  # fmt: skip
    assert not undocumented({name.removesuffix("_error") for name in names}, "metrics.md")


@pytest.mark.slow
def test_rollout_columns_of_on_policy_runs_are_documented(run_on_policy):
    found = all_keys(read_jsonl(run_on_policy / "rollouts.jsonl"))
    assert not undocumented(found, "artifacts.md", "Run folder")


# --- rollouts


@pytest.mark.slow
def test_columns_and_json_output_of_rollout_are_documented(rollouts):
    path, records = rollouts
    found = set().union(*read_jsonl(path)) - {"answer", "weight", "route"}
    assert not undocumented(found | set(RECORD_FIELDS[-7:]), "artifacts.md", "Rollouts")
    assert not undocumented(all_keys(records), "artifacts.md", "JSON output of commands")


def test_rollout_batch_files_of_unfinished_runs_are_documented(tmp_path):
    from xtk.rollouts.rollout_record import Rollout
    from xtk.runs import rollout_batch_files
    from xtk.text.document import Document

    path = tmp_path / "rollouts-00000-of-00001.jsonl"
    rollout_batch_files.write_rollouts(path, [Rollout(Document.from_text("a"), 0, 0, "stop")], "run")
    found = all_keys(read_jsonl(path)) | {rollout_batch_files.COMPARISON_FILE}
    assert not undocumented(found, "artifacts.md", "Rollout batches")


# --- output of commands


@pytest.mark.slow
def test_json_output_and_answers_of_evaluate_are_documented(pair, cache, folder):
    found = all_keys(
        printed_records("evaluate", pair.student, cache, "--compare-to", pair.teacher, "--by-category", "--json")
    )
    answers = printed_records(
        "evaluate-answers",
        pair.student,
        folder / "prompts.jsonl",
        "--compare-to",
        pair.teacher,
        "--reward",
        "regex:pattern=a",
        "--max-completion-length",
        4,
        "-o",
        folder / "answers.jsonl",
        "--json",
    )
    found |= {re.sub(r"@\d+", "@n" if "avg" in name else "@k", name) for name in all_keys(answers)}
    found |= all_keys(read_jsonl(folder / "answers.jsonl"))
    found = {name.removesuffix("_error").removesuffix("_difference") for name in found}
    assert not undocumented(found, "artifacts.md", "Evaluation output")


@pytest.mark.slow
def test_json_output_of_other_commands_is_documented(pair, cache, caches, corpus, projection, run_of_caches, folder):
    records = [
        *printed_records("inspect", cache, "--json"),
        *printed_records("inspect", projection, "--json"),
        *printed_records("inspect", run_of_caches, "--verify", "--json"),
        *printed_records("inspect", pair.student, "--json"),
        *printed_records("inspect", next(cache.glob("shard-*.arrow")), "--json"),
        *printed_records("align", pair.student, pair.teacher, corpus, "--stats", "--json"),
        *printed_records("align", pair.student, pair.teacher, "12 cafés", "--json"),
        *printed_records("cache-teacher", pair.teacher, corpus, "--estimate", "-o", folder / "x", "--json"),
        *printed_records("doctor", pair.student, pair.teacher, corpus, "--json", code=None),
        *printed_records("report", run_of_caches, "-o", folder / "page.html", "--json"),
        *printed_records("cache", "merge", cache, cache, "-o", folder / "merged", "--json"),
        *printed_records("build-projection", pair.student, pair.teacher, "-o", folder / "p", "--json"),
        *printed_records("export", run_of_caches, "-o", folder / "export-again", "--json"),
    ]
    found: set[str] = set()
    for record in records:
        found |= all_keys({key: value for key, value in record.items() if key not in ("header", "values")})
        found |= {key for kind in record.get("span_kinds", {}).values() for key in kind}
        found |= {record["check"]} if record.get("kind") == "finding" else set()
        if record.get("check") != "library_versions":  # its values are package names
            found |= set(record.get("values", {}))
    assert not undocumented(found - {*SPAN_KINDS}, "artifacts.md", "JSON output of commands")


@pytest.mark.long
def test_json_output_of_sweep_is_documented(pair, cache, folder):
    records = printed_records(
        "sweep", pair.student, cache, "--loss", "ce", "--max-steps", 1, "--vary", "seed=0 1", "-o", folder / "sweep",
        "--json",
    )  # fmt: skip
    assert not undocumented(all_keys(records), "artifacts.md", "JSON output of commands")
