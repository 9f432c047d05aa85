"""`xtk cache-teacher`: supports, precisions, estimates, candidate ids, teacher prompts and routes."""

from __future__ import annotations

import base64
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
from cache.reference_packed_codec import ReferenceDecoder
from xtk_processes import run_here

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import SUPPORTS, make_support

OPTIONS = {
    "top-k": ["--top-k", 8],
    "top-p": ["--top-p", 0.8, "--top-k", 12],
    "sample": ["--num-samples", 9],
    "top-k+sample": ["--top-k", 4, "--num-samples", 6, "--num-sample-sets", 2, "--seed", 3],
    "none": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("support", OPTIONS)
def test_a_cache_of_every_support_can_be_read_and_trained_on(run, pair, corpus, projection, tmp_path, support):
    run("cache-teacher", pair.teacher, corpus, "--support", support, *OPTIONS[support], "-o", tmp_path / "c")
    cache = TeacherCache(tmp_path / "c")
    assert cache.header["options"]["support"] == support
    num_sample_sets = cache.header["codec"]["num_sample_sets"]
    for number, row in enumerate(cache):
        for sample_set in range(max(1, num_sample_sets)):
            teacher_logprobs = cache.read_document(number, sample_set).teacher_logprobs
            mass = np.add.reduceat(np.exp(teacher_logprobs.logprobs.astype(np.float64)), teacher_logprobs.offsets[:-1])
            np.testing.assert_allclose(mass + teacher_logprobs.remainder_mass, 1, atol=0.02)
            assert (teacher_logprobs.remainder_mass == 0).all() == bool(num_sample_sets)
        ids_by_position = [
            row.teacher_logprobs.ids[low:high]
            for low, high in zip(row.teacher_logprobs.offsets, row.teacher_logprobs.offsets[1:], strict=False)
        ]
        assert all(
            token in ids
            for token, ids in zip(row.tokens.ids[row.teacher_logprobs.positions], ids_by_position, strict=True)
        )
    losses = ("--loss", "p-kl") if support != "none" else ("--loss", "ce", "--loss", "alm")
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
def test_a_packed_cache_matches_the_float32_cache_within_its_precision(
    run, pair, corpus, projection, tmp_path, precision
):
    support = ("--support", "top-k+sample", "--top-k", 6, "--num-samples", 5)
    for folder, cache_precision in (("plain", "float32"), ("packed", precision)):
        run("cache-teacher", pair.teacher, corpus, *support, "--precision", cache_precision, "-o", tmp_path / folder)
    plain, packed = TeacherCache(tmp_path / "plain"), TeacherCache(tmp_path / "packed")
    tolerance = {"fine": 0.13, "standard": 0.53, "coarse": 1.06}[precision]
    for one, other in zip(plain, packed, strict=True):
        assert one.document == other.document
        assert one.tokens.ids.tolist() == other.tokens.ids.tolist()
        assert one.tokens.byte_ends.tolist() == other.tokens.byte_ends.tolist()
        for name in ("ids", "offsets", "sample_ids", "sample_offsets", "sample_counts"):
            assert getattr(one.stored_logprobs, name).tolist() == getattr(other.stored_logprobs, name).tolist()
        assert np.abs(one.stored_logprobs.logprobs - other.stored_logprobs.logprobs).max(initial=0) <= tolerance
    run(
        "distill", pair.student, tmp_path / "packed", "--projection", projection, "--max-steps", 2, "-o", tmp_path / "s"
    )
    run("inspect", tmp_path / "packed", "--verify")


@pytest.mark.slow
def test_sample_sets_are_used_in_turn(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--support", "sample", "--num-sample-sets", 3, "-o", tmp_path / "c")
    cache = TeacherCache(tmp_path / "c")
    sampled_ids = [cache.read_document(0, sample_set).teacher_logprobs.ids.tolist() for sample_set in range(4)]
    assert sampled_ids[3] == sampled_ids[0]
    assert sampled_ids[0] != sampled_ids[1] != sampled_ids[2] != sampled_ids[0]


@pytest.mark.parametrize(
    ("options", "available_kinds", "kind", "top_k"),
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
def test_the_support_follows_from_the_given_options(options, available_kinds, kind, top_k):
    support = make_support("", available_kinds=available_kinds, **options)
    assert (support.kind, support.top_k) == (kind, top_k)
    assert support == make_support(kind, **options)


@pytest.mark.slow
def test_the_default_support_is_top_k_plus_sample(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "-o", tmp_path / "c")
    cache = TeacherCache(tmp_path / "c")
    options = {name: cache.header["options"][name] for name in ("support", "top_k", "num_samples", "num_sample_sets")}
    assert options == {"support": "top-k+sample", "top_k": 16, "num_samples": 16, "num_sample_sets": 1}
    assert cache.header["codec"]["precision"] == "standard"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--support", "topk"], "no support called 'topk'; did you mean top-k?"),
        (["--top-k", -1], "--top-k is -1"),
        (["--support", "top-p", "--top-p", 1.5], "--top-p is 1.5"),
        (["--support", "sample", "--num-samples", 0], "--num-samples is 0"),
        (["--support", "sample", "--num-sample-sets", 0], "invalid value for '--num-sample-sets'"),
    ],
)
def test_invalid_support_options_are_refused(pair, corpus, tmp_path, arguments, message):
    done = run_here("cache-teacher", pair.teacher, corpus, *arguments, "-o", tmp_path / "c", code=None)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_packed_cache_can_be_read_with_pyarrow_and_the_reference_decoder(run, pair, corpus, tmp_path):
    """Decode a cache without xtk, with pyarrow and the plain decoder that follows docs/reference/codec.md."""
    run("cache-teacher", pair.teacher, corpus, "--num-sample-sets", 2, "--shard-tokens", 400, "-o", tmp_path / "c")
    rows = iter(TeacherCache(tmp_path / "c"))
    for path in sorted((tmp_path / "c").glob("shard-*.arrow")):
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        codec = json.loads(batch.schema.metadata[b"xtk"])["codec"]
        vocabulary_order = (
            pa.ipc.open_file(pa.memory_map(str(path.parent / codec["vocabulary_order"]))).get_batch(0).to_pydict()
        )
        num_bytes = dict(zip(vocabulary_order["id"], vocabulary_order["num_bytes"], strict=True))
        reader = ReferenceDecoder(
            base64.b64decode(batch.schema.metadata[b"codec_tables"]),
            vocabulary_order["id"],
            [num_bytes[token] for token in range(len(num_bytes))],
            codec["precision"],
            codec["num_sample_sets"],
            codec["num_samples"],
            codec.get("sample_logprobs", False),
        )
        for record in batch.to_pylist():
            row = next(rows)
            ids, byte_ends = reader.tokens(record["tokens"], record["num_tokens"])
            assert (ids, byte_ends) == (row.tokens.ids.tolist(), row.tokens.byte_ends.tolist())
            assert "".join(segment["text"] for segment in record["segments"]) == row.document.text
            range_bounds = record["trained_ranges"]
            trained_positions = [
                index
                for start, stop in zip(range_bounds[::2], range_bounds[1::2], strict=True)
                for index in range(start, stop)
            ]
            assert trained_positions == row.stored_logprobs.positions.tolist()
            for index, position in enumerate(
                reader.positions(record["teacher_logprobs"], [ids[token_index] for token_index in trained_positions])
            ):
                entries = slice(row.stored_logprobs.offsets[index], row.stored_logprobs.offsets[index + 1])
                assert sorted(position.exact) == row.stored_logprobs.ids[entries].tolist()
                decoded_logprobs = [position.exact[token] for token in row.stored_logprobs.ids[entries].tolist()]
                np.testing.assert_allclose(decoded_logprobs, row.stored_logprobs.logprobs[entries], rtol=0, atol=1e-5)
                sample_sizes = [sum(counts.values()) for counts in position.sample_sets]
                assert sample_sizes == [codec["num_samples"]] * codec["num_sample_sets"]


@pytest.mark.slow
def test_estimate_predicts_the_cache_and_writes_nothing(run, pair, corpus, tmp_path):
    arguments = ("cache-teacher", pair.teacher, corpus, "--shard-tokens", 400, "-o", tmp_path / "c", "--json")
    estimate = json.loads(run(*arguments, "--estimate").stdout)
    assert not (tmp_path / "c").exists()
    result = json.loads(run(*arguments).stdout)
    shards = len(list((tmp_path / "c").glob("shard-*.arrow")))
    assert [estimate[name] for name in ("documents", "positions", "tokens", "shards")] == [
        *(result[name] for name in ("documents", "positions", "tokens")), shards,
    ]  # fmt: skip
    assert estimate["bytes"] == pytest.approx(result["bytes"], rel=0.25)
    assert estimate["seconds"] > 0
    assert estimate["memory_bytes"] > 50e6
    lines = run(*arguments[:-1], "--estimate").stdout.splitlines()
    assert ["positions", f"{estimate['positions']:,}"] in [line.split() for line in lines]


@pytest.mark.slow
def test_candidate_ids_are_scored_in_addition_to_the_observed_tokens(run, pair, tmp_path):
    from xtk.text.tokenizer import Tokenizer

    ids = Tokenizer(pair.teacher).encode(["Anna has 12 apples."])[0].ids.tolist()
    candidates = [[position, position + 1, 7] for position in range(len(ids) - 1)]
    line = json.dumps({"input_ids": ids, "candidate_ids": candidates})
    run("cache-teacher", pair.teacher, "-", "--support", "candidates", "-o", tmp_path / "c", stdin=line + "\n")
    estimate = ("cache-teacher", pair.teacher, "-", "--support", "candidates", "--estimate", "-o", tmp_path / "e")
    assert json.loads(run(*estimate, "--json", stdin=line + "\n").stdout)["positions"] == len(ids) - 1
    assert "needs the column candidate_ids" in run_here(*estimate, stdin='{"text": "Anna"}\n', code=1).stderr
    row = TeacherCache(tmp_path / "c").read_document(0)
    assert row.tokens.ids.tolist() == ids
    ids_by_position = [
        row.teacher_logprobs.ids[low:high]
        for low, high in zip(row.teacher_logprobs.offsets, row.teacher_logprobs.offsets[1:], strict=False)
    ]
    assert [sorted(stored_ids.tolist()) for stored_ids in ids_by_position] == [
        sorted({*position_candidates, token}) for position_candidates, token in zip(candidates, ids[1:], strict=True)
    ]
    done = run_here(
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
def test_options_that_a_support_does_not_use_are_refused(pair, corpus, tmp_path, options, message):
    assert message in run_here("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "c", code=1).stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_only_the_teacher_reads_the_teacher_prompt(run, pair, projection, tmp_path):
    lines = [
        json.dumps({"prompt": "12 + 5 =", "completion": " 17", "teacher_prompt": prompt})
        for prompt in ("The answer is 17. 12 + 5 =", "12 + 5 =")
    ]
    run("cache-teacher", pair.teacher, "-", "--top-k", 4, "-o", tmp_path / "c", stdin="\n".join(lines))
    privileged, plain = TeacherCache(tmp_path / "c")
    assert privileged.document == plain.document
    assert len(privileged.tokens) > len(plain.tokens)
    assert len(privileged.teacher_logprobs) == len(plain.teacher_logprobs)
    assert privileged.teacher_logprobs.logprobs.tolist() != plain.teacher_logprobs.logprobs.tolist()
    run("distill", pair.student, tmp_path / "c", "--projection", projection, "--max-steps", 1, "-o", tmp_path / "s")


@pytest.mark.slow
def test_a_route_matches_a_hub_teacher_by_its_model_name(run, pair, tmp_path):
    """The folder of a Hub model is named after a commit, which no route column would contain."""
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
