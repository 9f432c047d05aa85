"""What inspect says of a cache is so, and what its teacher does not say is found."""

from __future__ import annotations

import html.parser
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from xtk.artifacts.cache_statistics import bytes_by_section
from xtk.artifacts.cache_writer import ShardedCacheWriter
from xtk.artifacts.shard_writing import ScoredDocument
from xtk.artifacts.storage_folders import LocalFolder
from xtk.artifacts.teacher_cache import TeacherCache


@pytest.fixture(scope="module")
def caches(run, pair, corpus, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("supports")
    supports = {
        "top-k": ["--top-k", 4],
        "top-p": ["--top-p", 0.9, "--top-k", 20],
        "top-k+sample": ["--top-k", 2, "--num-samples", 5],
        "sample": ["--num-samples", 8],
        "none": [],
    }
    for name, options in supports.items():
        exact = ("--precision", "float32")
        run("cache-teacher", pair.teacher, corpus, "--support", name, *options, *exact, "-o", folder / name)
    return {name: folder / name for name in supports}


def inspected(run, place: object, *options: object) -> dict[str, object]:
    return json.loads(run("inspect", place, *options, "--json").stdout)


@pytest.mark.parametrize("support", ["top-k", "top-p", "top-k+sample", "sample", "none"])
def test_the_statistics_are_those_of_the_rows(run, caches, support):
    found = inspected(run, caches[support])["statistics"]
    cache = TeacherCache(caches[support])
    scores = [row.stored_logprobs for row in cache]
    tail = np.concatenate([row.remainder_mass for row in scores])
    assert found["mean_stored_mass"] == pytest.approx(1 - tail.mean(), abs=1e-5)
    assert found["mean_entropy_nats"] == pytest.approx(np.concatenate([row.entropy for row in scores]).mean(), abs=1e-5)
    assert found["mean_exact_ids"] == pytest.approx(sum(len(row.ids) for row in scores) / found["positions"], abs=1e-5)
    drawn = sum(len(row.sample_ids) for row in scores) / found["positions"]
    assert found["mean_sampled_ids"] == pytest.approx(drawn, abs=1e-5)
    opened = [shard.bytes_by_section() for shard in cache.shards()]
    assert found["bytes_by_section"] == {name: sum(parts[name] for parts in opened) for name in opened[0]}
    assert found["bytes_by_section"] == bytes_by_section(cache.manifest)
    assert sum(found["bytes_by_section"].values()) == found["bytes"]
    on_disk = sum(file.stat().st_size for file in caches[support].iterdir() if file.name != "manifest.json")
    assert found["bytes"] + found["shared_file_bytes"] == on_disk
    outside = found["observed_outside_top_k_fraction"]
    if support in ("sample", "none"):
        assert outside is None
        return
    plain = 0
    for row in scores:
        for at in range(len(row)):
            logprobs = row.logprobs[row.offsets[at] : row.offsets[at + 1]]
            others = np.sort(logprobs[logprobs > row.observed_logprobs[at]])[::-1]
            if support == "top-p":
                plain += len(others) >= 20 or np.exp(others.astype(np.float64)).sum() >= 0.9
            else:
                plain += len(others) >= {"top-k": 4, "top-k+sample": 2}[support]
    assert outside == pytest.approx(plain / found["positions"], abs=2e-3)


@pytest.mark.parametrize("support", ["top-k", "top-p", "top-k+sample", "sample", "none"])
def test_the_teacher_scored_again_says_what_the_cache_holds(run, caches, pair, support):
    record = inspected(run, caches[support], "--verify", "--teacher", pair.teacher, "--sample", 5)
    found = record["statistics"]["scored_again"]
    assert found["documents"] == 5
    assert found["same_weights"]
    assert found["largest_logprob_difference"] < 1e-4
    assert found["largest_entropy_difference"] < 1e-4
    assert abs(found["quantization_kl_nats"]) < 1e-5


def test_what_packing_adds_is_told_by_the_manifest_and_found_when_the_teacher_scores_again(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--top-k", 8, "--precision", "standard", "-o", tmp_path / "c")
    found = inspected(run, tmp_path / "c", "--teacher", pair.teacher, "--sample", 1000)["statistics"]
    again = found["scored_again"]
    assert 0 < found["quantization_kl_nats"] < 0.01
    assert again["quantization_kl_nats"] == pytest.approx(found["quantization_kl_nats"], rel=0.02)
    assert again["quantization_kl_fraction_of_entropy"] == pytest.approx(
        found["quantization_kl_fraction_of_entropy"], rel=0.02
    )
    assert 1e-3 < again["largest_logprob_difference"] <= found["quantization_largest_error_nats"]
    plain = inspected(run, tmp_path / "c", "--quiet")["statistics"]
    assert plain["quantization_kl_nats"] == found["quantization_kl_nats"]


def copy_of(cache: TeacherCache, folder: Path, change) -> Path:
    """Write a cache with other numbers, all of whose checksums fit."""
    rows = []
    for row in cache:
        scores = row.stored_logprobs
        arrays = {name: np.array(value) for name, value in vars(scores).items()}
        change(arrays)
        rows.append(ScoredDocument(row.document, row.tokens, type(scores)(**arrays)))
    codec = {"name": "raw", **{name: cache.header["codec"][name] for name in ("num_samples", "num_sample_sets")}}
    writer = ShardedCacheWriter(LocalFolder(folder), {**cache.header, "codec": codec}, [len(rows)])
    writer.write_shard(0, rows)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(cache.folder.name) / file, folder)
    writer.finish()
    return folder


def spoil_a_number(arrays: dict[str, np.ndarray]) -> None:
    arrays["logprobs"][len(arrays["logprobs"]) // 2] -= 0.01


def spoil_the_ids(arrays: dict[str, np.ndarray]) -> None:
    """Give the likeliest id of each position away for one that is not likely, and its own number."""
    for at in range(len(arrays["positions"])):
        kept = slice(arrays["offsets"][at], arrays["offsets"][at + 1])
        best = int(np.argmax(arrays["logprobs"][kept]))
        if arrays["logprobs"][kept][best] != arrays["observed_logprobs"][at]:
            arrays["ids"][kept][best] = next(token for token in range(400) if token not in arrays["ids"][kept])


@pytest.mark.parametrize("change", [spoil_a_number, spoil_the_ids])
def test_what_the_teacher_does_not_say_is_found_though_all_checksums_fit(run, caches, pair, tmp_path, change):
    wrong = copy_of(TeacherCache(caches["top-k"]), tmp_path / "wrong", change)
    done = run("inspect", wrong, "--verify")
    assert "all checksums match; use --teacher MODEL to score documents again" in done.stderr
    done = run("inspect", wrong, "--teacher", pair.teacher, code=1)
    assert "the log-probabilities in this cache differ from those that its teacher computes now" in done.stderr
    assert "where: row " in done.stderr


def test_another_model_is_named_as_such(run, caches, pair, tmp_path):
    done = run("inspect", caches["top-k"], "--teacher", pair.student, code=1)
    assert "--teacher has another tokenizer than the teacher that wrote this cache" in done.stderr
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(pair.teacher, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    done = run("inspect", caches["top-k"], "--teacher", other, code=1)
    assert "differ from those of the teacher of this cache" in done.stderr
    assert "computes other log-probabilities than the teacher that wrote this cache" in done.stderr


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.titles, self.open, self.far = "", [], [], []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.titles += [given["title"]] if tag == "bdi" and given.get("title") else []
        self.far += [value for name, value in attributes if name in ("src", "href") or tag == "script"]
        if tag not in ("meta", "rect", "line", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open and self.open[-1] == "bdi" else ""


def test_the_page_stands_alone_and_shows_the_documents(run, caches, tmp_path):
    page = Page()
    run("inspect", caches["top-k"], "--html", tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    page.feed(content)
    assert page.open == []
    assert page.far == []
    cache = TeacherCache(caches["top-k"])
    first = cache.read_document(0)
    seen = first.document.text.replace("\u200d", "")  # a joiner that nobody sees is drawn as its name
    assert "".join(seen.split()) in "".join(page.text.split())
    assert len(page.titles) == len(cache.read_document(0).stored_logprobs) + len(cache.read_document(1).stored_logprobs)
    likeliest = np.exp(first.stored_logprobs.logprobs[: first.stored_logprobs.offsets[1]].max())
    assert f"{likeliest:.3f}" in page.titles[0]
    for name in ("Probability mass of exact tokens", "Entropy", "Exact tokens"):
        assert f"<figcaption>{name}" in content


def test_the_weights_of_a_model_are_verified(run, pair, tmp_path):
    model = shutil.copytree(pair.student, tmp_path / "model")
    assert json.loads(run("inspect", model, "--json").stdout)["statistics"]["verified"] is None
    assert json.loads(run("inspect", model, "--verify", "--json").stdout)["statistics"]["verified"] is True
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    assert "has values that are not finite" in run("inspect", model, "--verify", code=1).stderr


def test_what_is_no_cache_has_no_teacher_and_no_page(run, projection, tmp_path):
    done = run("inspect", projection, "--html", tmp_path / "page.html", code=1)
    assert "--teacher and --html need a teacher cache" in done.stderr
