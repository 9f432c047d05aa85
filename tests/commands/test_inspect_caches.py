"""`xtk inspect` of caches: statistics, verification against the teacher, and the HTML page."""

from __future__ import annotations

import html.parser
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from xtk_processes import run_here

from xtk.cache.reader import TeacherCache
from xtk.cache.statistics import bytes_by_section
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.writer import ShardedCacheWriter
from xtk.files.storage_folders import LocalFolder


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


def verify_json(run, path: object, *options: object) -> dict[str, object]:
    return json.loads(run("cache", "verify", path, *options, "--json").stdout)


def inspect_json(run, path: object, *options: object) -> dict[str, object]:
    return json.loads(run("inspect", path, *options, "--json").stdout)


@pytest.mark.parametrize("support", ["top-k", "top-p", "top-k+sample", "sample", "none"])
def test_the_statistics_match_the_rows(run, caches, support):
    found = inspect_json(run, caches[support])["statistics"]
    cache = TeacherCache(caches[support])
    scores = [row.stored_logprobs for row in cache]
    remainder_masses = np.concatenate([row.remainder_mass for row in scores])
    assert found["mean_stored_mass"] == pytest.approx(1 - remainder_masses.mean(), abs=1e-5)
    assert found["mean_entropy_nats"] == pytest.approx(np.concatenate([row.entropy for row in scores]).mean(), abs=1e-5)
    assert found["mean_exact_ids"] == pytest.approx(sum(len(row.ids) for row in scores) / found["positions"], abs=1e-5)
    mean_sampled_ids = sum(len(row.sample_ids) for row in scores) / found["positions"]
    assert found["mean_sampled_ids"] == pytest.approx(mean_sampled_ids, abs=1e-5)
    bytes_by_shard = [shard.bytes_by_section() for shard in cache.shards()]
    assert found["bytes_by_section"] == {
        name: sum(parts[name] for parts in bytes_by_shard) for name in bytes_by_shard[0]
    }
    assert found["bytes_by_section"] == bytes_by_section(cache.manifest)
    assert sum(found["bytes_by_section"].values()) == found["bytes"]
    on_disk = sum(file.stat().st_size for file in caches[support].iterdir() if file.name != "manifest.json")
    assert found["bytes"] + found["shared_file_bytes"] == on_disk
    outside_fraction = found["observed_outside_top_k_fraction"]
    if support in ("sample", "none"):
        assert outside_fraction is None
        return
    num_outside = 0
    for row in scores:
        for index in range(len(row)):
            logprobs = row.logprobs[row.offsets[index] : row.offsets[index + 1]]
            more_likely = np.sort(logprobs[logprobs > row.observed_logprobs[index]])[::-1]
            if support == "top-p":
                num_outside += len(more_likely) >= 20 or np.exp(more_likely.astype(np.float64)).sum() >= 0.9
            else:
                num_outside += len(more_likely) >= {"top-k": 4, "top-k+sample": 2}[support]
    assert outside_fraction == pytest.approx(num_outside / found["positions"], abs=2e-3)


@pytest.mark.parametrize("support", ["top-k", "top-p", "top-k+sample", "sample", "none"])
def test_scoring_again_with_the_teacher_matches_the_cache(run, caches, pair, support):
    found = verify_json(run, caches[support], pair.teacher, "--sample", 5)["scored_again"]
    assert found["documents"] == 5
    assert found["same_weights"]
    assert found["largest_logprob_difference"] < 1e-4
    assert found["largest_entropy_difference"] < 1e-4
    assert abs(found["quantization_kl_nats"]) < 1e-5


def test_the_quantization_error_in_the_manifest_matches_scoring_again(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--top-k", 8, "--precision", "standard", "-o", tmp_path / "c")
    found = inspect_json(run, tmp_path / "c")["statistics"]
    rescored = verify_json(run, tmp_path / "c", pair.teacher, "--sample", 1000)["scored_again"]
    assert 0 < found["quantization_kl_nats"] < 0.01
    assert rescored["quantization_kl_nats"] == pytest.approx(found["quantization_kl_nats"], rel=0.02)
    assert rescored["quantization_kl_fraction_of_entropy"] == pytest.approx(
        found["quantization_kl_fraction_of_entropy"], rel=0.02
    )
    assert 1e-3 < rescored["largest_logprob_difference"] <= found["quantization_largest_error_nats"]
    without_teacher = inspect_json(run, tmp_path / "c", "--quiet")["statistics"]
    assert without_teacher["quantization_kl_nats"] == found["quantization_kl_nats"]


def write_changed_copy(cache: TeacherCache, folder: Path, change) -> Path:
    """Write a copy of a cache with changed values and valid checksums."""
    rows = []
    for row in cache:
        scores = row.stored_logprobs
        arrays = {name: np.array(value) for name, value in vars(scores).items()}
        change(arrays)
        rows.append(TeacherDocument(row.document, row.tokens, type(scores)(**arrays)))
    sizes = {name: cache.header["codec"][name] for name in ("num_samples", "num_sample_sets")}
    codec = {"name": "raw", "precision": "float32", **sizes}
    writer = ShardedCacheWriter(LocalFolder(folder), {**cache.header, "codec": codec}, [len(rows)])
    writer.write_shard(0, rows)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(cache.folder.name) / file, folder)
    writer.finish()
    return folder


def change_one_logprob(arrays: dict[str, np.ndarray]) -> None:
    arrays["logprobs"][len(arrays["logprobs"]) // 2] -= 0.01


def replace_most_likely_ids(arrays: dict[str, np.ndarray]) -> None:
    """Replace each position's most likely id, unless it is observed, by an unlikely one; keep the log-probability."""
    for index in range(len(arrays["positions"])):
        entries = slice(arrays["offsets"][index], arrays["offsets"][index + 1])
        most_likely = int(np.argmax(arrays["logprobs"][entries]))
        if arrays["logprobs"][entries][most_likely] != arrays["observed_logprobs"][index]:
            arrays["ids"][entries][most_likely] = next(
                token for token in range(400) if token not in arrays["ids"][entries]
            )


@pytest.mark.parametrize("change", [change_one_logprob, replace_most_likely_ids])
def test_scoring_again_finds_changed_values_that_checksums_do_not_show(run, caches, pair, tmp_path, change):
    changed = write_changed_copy(TeacherCache(caches["top-k"]), tmp_path / "wrong", change)
    assert "verified" in run("inspect", changed, "--verify").stdout
    done = run("cache", "verify", changed)
    assert done.stdout == f"{changed}\n"
    assert "all checksums match; give TEACHER to score documents again" in done.stderr
    done = run("cache", "verify", changed, pair.teacher, code=1)
    assert "the log-probabilities in this cache differ from those that its teacher computes now" in done.stderr
    assert "where: row " in done.stderr


def test_scoring_again_with_another_model_is_refused(run, caches, pair, tmp_path):
    done = run("cache", "verify", caches["top-k"], pair.student, code=1)
    assert "has another tokenizer than the teacher that wrote this cache" in done.stderr
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(pair.teacher, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    done = run("cache", "verify", caches["top-k"], other, code=1)
    assert "differ from those of the teacher of this cache" in done.stderr
    assert "computes other log-probabilities than the teacher that wrote this cache" in done.stderr


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.titles, self.open, self.external = "", [], [], []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.titles += [values["title"]] if tag == "bdi" and values.get("title") else []
        self.external += [value for name, value in attributes if name in ("src", "href") or tag == "script"]
        if tag not in ("meta", "rect", "line", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open and self.open[-1] == "bdi" else ""


def test_the_page_is_self_contained_and_shows_the_documents(run, caches, tmp_path):
    page = Page()
    run("inspect", caches["top-k"], "--html", tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    page.feed(content)
    assert page.open == []
    assert page.external == []
    cache = TeacherCache(caches["top-k"])
    first = cache.read_document(0)
    visible_text = first.document.text.replace("\u200d", "")  # an invisible joiner is shown as its name
    assert "".join(visible_text.split()) in "".join(page.text.split())
    assert len(page.titles) == len(cache.read_document(0).stored_logprobs) + len(cache.read_document(1).stored_logprobs)
    top_prob = np.exp(first.stored_logprobs.logprobs[: first.stored_logprobs.offsets[1]].max())
    assert f"{top_prob:.3f}" in page.titles[0]
    for name in ("Probability mass of exact tokens", "Entropy", "Exact tokens"):
        assert f"<figcaption>{name}" in content


def test_verify_finds_weights_that_are_not_finite(run, pair, tmp_path):
    model = shutil.copytree(pair.student, tmp_path / "model")
    assert json.loads(run("inspect", model, "--json").stdout)["statistics"]["verified"] is None
    assert json.loads(run("inspect", model, "--verify", "--json").stdout)["statistics"]["verified"] is True
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    assert "has values that are not finite" in run_here("inspect", model, "--verify", code=1).stderr


def test_inspect_html_refuses_a_file_that_is_not_a_cache(projection, tmp_path):
    done = run_here("inspect", projection, "--html", tmp_path / "page.html", code=1)
    assert "--html needs a teacher cache" in done.stderr
