"""--start-token reaches every model that reads a text, its identity, and the files of a trained student."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import small_inputs
from transformers import AutoTokenizer

from xtk.api.tokenizer_argument import to_tokenizer
from xtk.cache.manifest import MANIFEST, manifest_bytes, manifest_checksum, teacher_bits_per_byte
from xtk.cache.reader import TeacherCache
from xtk.data.corpus_reader import Corpus
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, RunPlan
from xtk.doctor.start_token_checks import start_tokens
from xtk.models.resolver import ModelRef
from xtk.runs.checkpoint import copy_tokenizer_files
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.text.tokenizer import Tokenizer

BOS, EOS = 0, 1
TEXT = "Anna has 12 apples."


@pytest.fixture(scope="module")
def trained(run, pair, tmp_path_factory):
    """A student that was trained without its tokenizer's start token, and its data."""
    folder = tmp_path_factory.mktemp("start")
    data = small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(64, seed=11))
    command = ("distill", pair.student, data, "--loss", "ce", "--max-steps", 60, "--learning-rate", 0.01,
               "--per-device-train-batch-size", 16, "-o", folder / "run", "--start-token")  # fmt: skip
    run(*command, "none")
    return folder / "run", data, command


@pytest.mark.slow
def test_a_student_is_saved_with_the_start_token_that_it_was_trained_with(run, trained, pair):
    folder, _, command = trained
    assert Tokenizer(pair.student).start_ids == (BOS,)
    assert Tokenizer(folder).start_ids == ()
    assert AutoTokenizer.from_pretrained(folder)(TEXT).input_ids == Tokenizer(folder).encode([TEXT])[0].ids.tolist()
    assert run(*command, "none").stdout == f"{folder}\n"  # finished already
    refused = run(*command, "auto", code=1)
    assert "start_ids" in refused.stderr


@pytest.mark.slow
def test_a_student_with_another_start_token_keeps_its_tokenizer(run, trained, pair, tmp_path):
    folder, data, _ = trained
    before, after = Tokenizer(pair.student), Tokenizer(folder)
    assert before.start_ids != after.start_ids
    assert before.fingerprint != after.fingerprint
    assert before.text_fingerprint == after.text_fingerprint != Tokenizer(pair.teacher).text_fingerprint
    run("cache-teacher", pair.student, data, "--top-k", 8, "-o", tmp_path / "cache")
    run("distill", folder, tmp_path / "cache", "--loss", "forward-kl", "--max-steps", 1, "-o", tmp_path / "again")
    printed = run("distill", folder, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "default").stderr
    assert "forward-kl" in printed
    assert "byte-kl" not in printed


def test_an_adapters_tokenizer_counts_unless_it_has_more_tokens_than_the_model(pair, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    assert Tokenizer(pair.student, adapter=adapter).folder == pair.student  # it has none
    copy_tokenizer_files(pair.student, adapter, "none")
    assert Tokenizer(pair.student, adapter=adapter).start_ids == ()
    content = json.loads((adapter / "tokenizer.json").read_text())
    rows = Tokenizer(pair.student).embedding_rows
    added = {"id": rows, "content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip
    more = [
        {**added, "id": number, "content": f"[PAD{number}]"} for number in range(len(Tokenizer(pair.student)), rows)
    ]
    content["added_tokens"] += [*more, added]
    (adapter / "tokenizer.json").write_text(json.dumps(content))
    used = Tokenizer(pair.student, adapter=adapter)
    assert (used.start_ids, used.embedding_rows, used.folder) == ((BOS,), rows, pair.student)
    assert "the adapter's has more tokens than the model rows" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_of_a_run_keep_its_start_token(run, trained, pair, tmp_path):
    _, data, _ = trained
    run("distill", pair.student, data, "--loss", "ce", "--max-steps", 1, "--lora-r", 2, "--start-token", "none",
        "--save-steps", 1, "--save-total-limit", 2, "-o", tmp_path / "run")  # fmt: skip
    rows = []
    for place in (tmp_path / "run", tmp_path / "run" / "adapter"):
        rows.append(json.loads(run("evaluate", place, data, "--json").stdout))
        out = tmp_path / f"{place.name}.jsonl"
        run("rollout", place, data, "--max-prompts", 1, "--max-completion-length", 2, "-o", out)
        (line,) = out.read_text().splitlines()
        assert json.loads(line)["student_ids"][0] != BOS
    assert rows[0]["bytes"] == rows[1]["bytes"]
    assert Tokenizer(pair.student, adapter=tmp_path / "run" / "adapter").start_ids == ()
    copied = pickle.loads(pickle.dumps(Tokenizer(pair.student, adapter=tmp_path / "run" / "adapter")))
    assert (copied.start_ids, copied.embedding_rows) == ((), Tokenizer(pair.student).embedding_rows)
    run("distill", tmp_path / "run" / "adapter", data, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "again")
    assert Tokenizer(tmp_path / "again").start_ids == ()


def test_the_teacher_self_reads_what_the_student_reads(pair):
    for start_token, ids in (("none", ()), ("eos", (EOS,)), ("auto", (BOS,))):
        options = {"long_documents": "refuse", "trust_remote_code": False, "student": ModelRef(pair.student)}
        own = parse_online_teacher("self", student_start=start_token, **options)
        assert own.teacher_tokenizer.start_ids == own.request.teacher_tokenizer().start_ids == ids
        given = parse_online_teacher("self:start_token=bos", student_start=start_token, **options)
        assert given.teacher_tokenizer.start_ids == (BOS,)
        other = parse_online_teacher(str(pair.student), student_start=start_token, **options)
        assert other.teacher_tokenizer.start_ids == (BOS,)


def test_a_class_of_transformers_without_start_tokens_is_not_saved(pair, tmp_path):
    source = shutil.copytree(pair.student, tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "GPTNeoXTokenizer"}))
    assert Tokenizer(source).start_ids == ()
    (first,) = Tokenizer(source).encode([TEXT])
    for start_token, ids in (("eos", (EOS,)), ("none", ()), ("bos", (BOS,))):
        saved = tmp_path / start_token
        saved.mkdir()
        copy_tokenizer_files(source, saved, start_token)
        assert Tokenizer(saved).start_ids == ids
        assert AutoTokenizer.from_pretrained(saved)(TEXT).input_ids == [*ids, *first.ids.tolist()]


def test_doctor_finds_a_start_token_that_makes_a_model_worse(trained, pair, tmp_path, capfd):
    folder, data, _ = trained
    wrong = shutil.copytree(folder, tmp_path / "student", ignore=shutil.ignore_patterns("checkpoint-*"))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # those of the student before training: a bos token
        shutil.copy(pair.student / name, wrong / name)
    models = [DoctorModel.read(role, place, role) for role, place in (("student", wrong), ("teacher", folder))]
    findings = list(start_tokens(DoctorInputs(models[0], models[1], RunPlan(), corpus=Corpus([str(data)]))))
    assert [finding.level for finding in findings][:2] == ["warning", "ok"]
    assert "evaluate:" not in capfd.readouterr().err
    assert findings[0].what.startswith("no start token predicts the texts better than <|begin_of_text|>")
    assert findings[0].hint == "use --start-token 'none' in every command with this model"
    bits = findings[0].figures["bits_per_byte"]
    assert bits["no start token"] < 0.98 * bits["<|begin_of_text|>"]
    assert bits["no start token"] == findings[1].figures["bits_per_byte"]["no start token"]
    level = findings[2].figures["bits_per_byte"]["all"]
    assert level == {"student": bits["<|begin_of_text|>"], "teacher": bits["no start token"]}


def test_doctor_reports_a_teacher_that_is_not_better_than_the_student(trained, pair):
    folder, data, _ = trained
    models = [DoctorModel.read(*side) for side in (("student", folder, "s"), ("teacher", pair.teacher, "t"))]
    *_, level = start_tokens(DoctorInputs(models[0], models[1], RunPlan(), corpus=Corpus([str(data)])))
    assert (level.check, level.level, level.where) == ("teacher_level", "warning", "teacher t")
    bits = level.figures["bits_per_byte"]
    assert {"all", "Latin"} <= bits.keys()
    assert bits["all"]["teacher"] > bits["all"]["student"]
    assert "the teacher is not better than the student by 5% on all texts, " in level.what


@pytest.mark.slow
def test_a_cache_records_the_start_of_its_teacher(run, pair, corpus, tmp_path):
    for start_token, ids in (("none", []), ("<|endoftext|>", [0]), ("auto", [1])):
        place = tmp_path / start_token.strip("<|>")
        command = ("cache-teacher", pair.teacher, corpus, "--top-k", 4, "-o", place, "--start-token")
        run(*command, start_token)
        cache = TeacherCache(place)
        assert cache.header["teacher"]["start_ids"] == ids
        assert list(cache.teacher_tokenizer.start_ids) == ids
        assert list(pickle.loads(pickle.dumps(cache.teacher_tokenizer)).start_ids) == ids
        stored = cache.read_document(0)
        text_ids = Tokenizer(pair.teacher).encode([stored.document.text])[0].ids.tolist()
        assert stored.tokens.ids.tolist() == [*ids, *text_ids, cache.teacher_tokenizer.end_id]
        run(*command, "eos" if start_token != "auto" else "none", code=1)


def test_a_cache_without_a_recorded_start_has_bos_else_eos(cache, tmp_path):
    older = shutil.copytree(cache, tmp_path / "cache")
    content = json.loads((older / MANIFEST).read_text())
    del content["checksum"], content["header"]["teacher"]["start_ids"]
    for shard in content["shards"]:
        del shard["text_bits"], shard["text_bytes"]
    (older / MANIFEST).write_bytes(manifest_bytes(content | {"checksum": manifest_checksum(content)}))
    opened = TeacherCache(older)
    assert opened.teacher_tokenizer.start_ids == (EOS,)
    assert teacher_bits_per_byte(opened.manifest) is None


@pytest.mark.slow
@pytest.mark.parametrize(("start_token", "ids"), [("none", []), ("eos", [EOS]), ("auto", [BOS])])
def test_rollouts_begin_with_the_start_token(run, pair, tmp_path, start_token, ids):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}) + "\n")
    run("rollout", pair.student, prompts, "--max-completion-length", 2, "--start-token", start_token,
        "-o", tmp_path / "out.jsonl")  # fmt: skip
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    expected = [*ids, *Tokenizer(pair.student).encode([TEXT])[0].ids.tolist()]
    assert line["student_ids"][: len(expected)] == expected


def test_transplant_writes_the_chosen_start_token(run, pair, tmp_path):
    for start_token, ids in (("none", ()), ("bos", (BOS,)), ("eos", (EOS,))):
        run("transplant", pair.teacher, pair.student, "--start-token", start_token, "-o", tmp_path / start_token)
        assert Tokenizer(tmp_path / start_token).start_ids == ids


@pytest.mark.slow
def test_an_online_teacher_has_its_own_start_token(run, pair, corpus, tmp_path):
    for start_token in ("none", "eos"):
        run("distill", pair.student, corpus, "--teacher", f"{pair.teacher}:start_token={start_token}", "--max-steps", 2,
            "-o", tmp_path / start_token)  # fmt: skip
    losses = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])["loss"] for name in ("none", "eos")
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("command", ["cache-teacher", "distill", "evaluate", "rollout", "transplant"])
def test_a_start_token_that_the_tokenizer_lacks_is_refused(run, command, pair, corpus, tmp_path):
    arguments = {"transplant": [pair.student], "evaluate": [corpus]}.get(command, [corpus])
    arguments += ["--loss", "ce"] if command == "distill" else []
    arguments += [] if command == "evaluate" else ["-o", tmp_path / "out.jsonl"]
    refused = run(command, pair.teacher, *arguments, "--start-token", "<|none|>", code=1)
    assert "no special token '<|none|>' to start a text with" in refused.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_tokenizer_of_transformers_keeps_the_start_token_that_it_adds(pair):
    tokenizer = AutoTokenizer.from_pretrained(pair.student)
    assert to_tokenizer(tokenizer).folder == pair.student
    for adds, ids in ((False, ()), (True, (BOS,))):
        tokenizer.add_bos_token = adds
        assert to_tokenizer(tokenizer).start_ids == ids
        assert tokenizer(TEXT).input_ids[: len(ids)] == list(ids)
