"""`xtk cache-teacher`: every support gives a cache that trains, and a plan tells what it will be."""

from __future__ import annotations

import base64
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
from artifacts.reference_packed_codec import PlainCodec

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.tokens.teacher_logprobs import SUPPORTS, make_support

OPTIONS = {
    "top-k": ["--top-k", 8],
    "top-p": ["--top-p", 0.8, "--top-k", 12],
    "sample": ["--num-samples", 9],
    "top-k+sample": ["--top-k", 4, "--num-samples", 6, "--num-sample-sets", 2, "--seed", 3],
    "none": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_cache_of_every_support_is_read_whole_and_trains(run, pair, corpus, projection, tmp_path, kind):
    run("cache-teacher", pair.teacher, corpus, "--support", kind, *OPTIONS[kind], "-o", tmp_path / "c")
    found = TeacherCache(tmp_path / "c")
    assert found.header["options"]["support"] == kind
    sets = found.header["codec"]["num_sample_sets"]
    for row in found:
        for number in range(max(1, sets)):
            signal = found.read_document(0, number).teacher_logprobs
            mass = np.add.reduceat(np.exp(signal.logprobs.astype(np.float64)), signal.offsets[:-1])
            np.testing.assert_allclose(mass + signal.remainder_mass, 1, atol=0.02)
            assert (signal.remainder_mass == 0).all() == bool(sets)
        held = [
            row.teacher_logprobs.ids[low:high]
            for low, high in zip(row.teacher_logprobs.offsets, row.teacher_logprobs.offsets[1:], strict=False)
        ]
        assert all(
            token in ids for token, ids in zip(row.tokens.ids[row.teacher_logprobs.positions], held, strict=True)
        )
    losses = ("--loss", "p-kl") if kind != "none" else ("--loss", "ce", "--loss", "alm")
    done = run(
        "distill", pair.student, tmp_path / "c", "--projection", projection, *losses,
        "--max-steps", 2, "-o", tmp_path / "s", "--json",
    )  # fmt: skip
    assert np.isfinite(json.loads(done.stdout)["metrics"]["loss"])
    record = json.loads(run("inspect", tmp_path / "c", "--verify", "--json").stdout)
    assert record["statistics"]["documents"] == 40


@pytest.mark.parametrize(
    "precision", ["standard", *(pytest.param(one, marks=pytest.mark.long) for one in ("fine", "coarse"))]
)
def test_a_packed_cache_says_what_the_plain_one_says(run, pair, corpus, projection, tmp_path, precision):
    support = ("--support", "top-k+sample", "--top-k", 6, "--num-samples", 5)
    for folder, wanted in (("plain", "float32"), ("packed", precision)):
        run("cache-teacher", pair.teacher, corpus, *support, "--precision", wanted, "-o", tmp_path / folder)
    plain, packed = TeacherCache(tmp_path / "plain"), TeacherCache(tmp_path / "packed")
    bound = {"fine": 0.13, "standard": 0.53, "coarse": 1.06}[precision]
    for one, other in zip(plain, packed, strict=True):
        assert one.document == other.document
        assert one.tokens.ids.tolist() == other.tokens.ids.tolist()
        assert one.tokens.byte_ends.tolist() == other.tokens.byte_ends.tolist()
        for name in ("ids", "offsets", "sample_ids", "sample_offsets", "sample_counts"):
            assert getattr(one.stored_logprobs, name).tolist() == getattr(other.stored_logprobs, name).tolist()
        assert np.abs(one.stored_logprobs.logprobs - other.stored_logprobs.logprobs).max(initial=0) <= bound
    run(
        "distill", pair.student, tmp_path / "packed", "--projection", projection, "--max-steps", 2, "-o", tmp_path / "s"
    )
    run("inspect", tmp_path / "packed", "--verify")


def test_sets_of_draws_are_taken_in_turn(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--support", "sample", "--num-sample-sets", 3, "-o", tmp_path / "c")
    found = TeacherCache(tmp_path / "c")
    drawn = [found.read_document(0, draw).teacher_logprobs.ids.tolist() for draw in range(4)]
    assert drawn[3] == drawn[0]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@pytest.mark.parametrize(
    ("named", "able", "kind", "ids"),
    [
        ({}, SUPPORTS, "top-k+sample", 16),
        ({}, ("top-k", "top-p", "none"), "top-k", 64),
        ({"top_k": 5}, SUPPORTS, "top-k", 5),
        ({"top_k": 5, "num_samples": 3}, SUPPORTS, "top-k+sample", 5),
        ({"num_samples": 3}, SUPPORTS, "top-k+sample", 16),
        ({"top_p": 0.9}, SUPPORTS, "top-p", 64),
        ({"top_p": 0.9, "top_k": 5}, SUPPORTS, "top-p", 5),
    ],
)
def test_numbers_that_are_named_say_which_support_is_meant(named, able, kind, ids):
    support = make_support("", available_kinds=able, **named)
    assert (support.kind, support.top_k) == (kind, ids)
    assert support == make_support(kind, **named)


def test_what_is_kept_if_nothing_is_named(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "-o", tmp_path / "c")
    cache = TeacherCache(tmp_path / "c")
    asked = {name: cache.header["options"][name] for name in ("support", "top_k", "num_samples", "num_sample_sets")}
    assert asked == {"support": "top-k+sample", "top_k": 16, "num_samples": 16, "num_sample_sets": 1}
    assert cache.header["codec"]["precision"] == "standard"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--support", "topk"], "no support called 'topk'; did you mean top-k?"),
        (["--top-k", -1], "--top-k is -1"),
        (["--support", "top-p", "--top-p", 1.5], "--top-p is 1.5"),
        (["--support", "sample", "--num-samples", 0], "--num-samples is 0"),
        (["--support", "sample", "--num-sample-sets", 0], "'--num-sample-sets'"),
    ],
)
def test_a_support_that_makes_no_sense_is_refused_before_anything_is_read(
    run, pair, corpus, tmp_path, arguments, words
):
    done = run("cache-teacher", pair.teacher, corpus, *arguments, "-o", tmp_path / "c", code=None)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert not (tmp_path / "c").exists()


def test_a_stranger_reads_a_packed_cache_with_pyarrow_and_the_reference_alone(run, pair, corpus, tmp_path):
    """Nothing of xtk: pyarrow, and the plain reader that follows docs/reference/codec.md."""
    run("cache-teacher", pair.teacher, corpus, "--num-sample-sets", 2, "--shard-tokens", 400, "-o", tmp_path / "c")
    rows = iter(TeacherCache(tmp_path / "c"))
    for path in sorted((tmp_path / "c").glob("shard-*.arrow")):
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        codec = json.loads(batch.schema.metadata[b"xtk"])["codec"]
        ranks = pa.ipc.open_file(pa.memory_map(str(path.parent / codec["vocabulary_order"]))).get_batch(0).to_pydict()
        lengths = dict(zip(ranks["id"], ranks["num_bytes"], strict=True))
        reader = PlainCodec(
            base64.b64decode(batch.schema.metadata[b"codec_tables"]),
            ranks["id"],
            [lengths[token] for token in range(len(lengths))],
            codec["precision"],
            codec["num_sample_sets"],
            codec["num_samples"],
        )
        for record in batch.to_pylist():
            row = next(rows)
            ids, ends = reader.tokens(record["tokens"], record["num_tokens"])
            assert (ids, ends) == (row.tokens.ids.tolist(), row.tokens.byte_ends.tolist())
            assert "".join(segment["text"] for segment in record["segments"]) == row.document.text
            edges = record["trained_ranges"]
            trained = [at for start, stop in zip(edges[::2], edges[1::2], strict=True) for at in range(start, stop)]
            assert trained == row.stored_logprobs.positions.tolist()
            for at, position in enumerate(
                reader.positions(record["teacher_logprobs"], [ids[place] for place in trained])
            ):
                kept = slice(row.stored_logprobs.offsets[at], row.stored_logprobs.offsets[at + 1])
                assert sorted(position.exact) == row.stored_logprobs.ids[kept].tolist()
                said = [position.exact[token] for token in row.stored_logprobs.ids[kept].tolist()]
                np.testing.assert_allclose(said, row.stored_logprobs.logprobs[kept], rtol=0, atol=1e-5)
                samples = [sum(drawn.values()) for drawn in position.draws]
                assert samples == [codec["num_samples"]] * codec["num_sample_sets"]


def test_a_plan_tells_what_the_cache_will_be_and_writes_nothing(run, pair, corpus, tmp_path):
    arguments = ("cache-teacher", pair.teacher, corpus, "--shard-tokens", 400, "-o", tmp_path / "c", "--json")
    plan = json.loads(run(*arguments, "--estimate").stdout)
    assert not (tmp_path / "c").exists()
    figures = json.loads(run(*arguments).stdout)
    shards = len(list((tmp_path / "c").glob("shard-*.arrow")))
    assert [plan[name] for name in ("documents", "positions", "tokens", "shards")] == [
        *(figures[name] for name in ("documents", "positions", "tokens")), shards,
    ]  # fmt: skip
    assert plan["bytes"] == pytest.approx(figures["bytes"], rel=0.25)
    assert plan["seconds"] > 0
    assert plan["memory_bytes"] > 50e6
    lines = run(*arguments[:-1], "--estimate").stdout.splitlines()
    assert ["positions", f"{plan['positions']:,}"] in [line.split() for line in lines]


def test_given_ids_are_scored_beside_the_tokens_that_stand_there(run, pair, tmp_path):
    from xtk.tokens.tokenizer import Tokenizer

    ids = Tokenizer(pair.teacher).encode(["Anna has 12 apples."])[0].ids.tolist()
    given = [[at, at + 1, 7] for at in range(len(ids) - 1)]
    line = json.dumps({"input_ids": ids, "candidate_ids": given})
    run("cache-teacher", pair.teacher, "-", "--support", "candidates", "-o", tmp_path / "c", stdin=line + "\n")
    estimate = ("cache-teacher", pair.teacher, "-", "--support", "candidates", "--estimate", "-o", tmp_path / "e")
    assert json.loads(run(*estimate, "--json", stdin=line + "\n").stdout)["positions"] == len(ids) - 1
    assert "needs the column candidate_ids" in run(*estimate, stdin='{"text": "Anna"}\n', code=1).stderr
    row = TeacherCache(tmp_path / "c").read_document(0)
    assert row.tokens.ids.tolist() == ids
    held = [
        row.teacher_logprobs.ids[low:high]
        for low, high in zip(row.teacher_logprobs.offsets, row.teacher_logprobs.offsets[1:], strict=False)
    ]
    assert [sorted(found.tolist()) for found in held] == [
        sorted({*wanted, token}) for wanted, token in zip(given, ids[1:], strict=True)
    ]
    done = run(
        "cache-teacher",
        pair.teacher,
        "-",
        "--support",
        "candidates",
        "-o",
        tmp_path / "d",
        stdin='{"text": "Anna"}\n',
        code=1,
    )
    assert "needs the column candidate_ids, which a document of the data lacks" in done.stderr
    assert "candidate_ids" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 0.9, "--num-samples", 8), "--num-samples has no effect with --support top-p"),
        (("--support", "sample", "--top-k", 8), "--top-k has no effect with --support sample"),
        (("--support", "top-k", "--seed", 3), "--seed has no effect with --support top-k"),
        (("--support", "none", "--num-sample-sets", 2), "--num-sample-sets has no effect with --support none"),
        (("--top-k", 4, "--num-samples", 4, "--top-p", 0.5), "--num-samples has no effect with --support top-p"),
    ],
)
def test_options_that_a_support_does_not_use_are_refused(run, pair, corpus, tmp_path, options, message):
    assert message in run("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "c", code=1).stderr
    assert not (tmp_path / "c").exists()


def test_a_teacher_reads_a_prompt_of_its_own_and_students_do_not(run, pair, projection, tmp_path):
    lines = [
        json.dumps({"prompt": "12 + 5 =", "completion": " 17", "teacher_prompt": prompt})
        for prompt in ("The answer is 17. 12 + 5 =", "12 + 5 =")
    ]
    run("cache-teacher", pair.teacher, "-", "--top-k", 4, "-o", tmp_path / "c", stdin="\n".join(lines))
    helped, alone = TeacherCache(tmp_path / "c")
    assert helped.document == alone.document
    assert len(helped.tokens) > len(alone.tokens)
    assert len(helped.teacher_logprobs) == len(alone.teacher_logprobs)
    assert helped.teacher_logprobs.logprobs.tolist() != alone.teacher_logprobs.logprobs.tolist()
    run("distill", pair.student, tmp_path / "c", "--projection", projection, "--max-steps", 1, "-o", tmp_path / "s")


def test_a_route_names_a_teacher_of_the_hub_by_its_id(run, pair, tmp_path):
    """A model of the hub lies in a folder that is called after a commit, which no column would contain."""
    folder = tmp_path / "models--own--My-Teacher" / "snapshots" / "0123456789abcdef"
    shutil.copytree(pair.teacher, folder)
    data = tmp_path / "data.jsonl"
    rows = [{"text": f"the number {number}", "by": ["My-Teacher", "other"][number % 2]} for number in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(pair.teacher, tmp_path / "other")
    for name, teacher in (("one", folder), ("two", tmp_path / "other")):
        run("cache-teacher", teacher, data, "--route-column", "by", "--top-k", 4, "-o", tmp_path / name)
    assert TeacherCache(tmp_path / "one").header["teacher"]["name"] == "My-Teacher"
    routed = run("distill", pair.student, tmp_path / "one", tmp_path / "two", "--combine-teachers", "route", "--loss",
                 "byte-kl", "--max-steps", 1, "-o", tmp_path / "run")  # fmt: skip
    assert not routed.returncode
    online = run("distill", pair.student, data, "--route-column", "by", "--teacher", folder, "--teacher",
                 tmp_path / "other", "--combine-teachers", "route", "--loss", "byte-kl", "--max-steps", 1, "-o",
                 tmp_path / "online")  # fmt: skip
    assert not online.returncode
