"""`xtk inspect` of caches: statistics, verification, and the HTML page."""

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
from xtk.cache.teacher_logprobs import kl_on_stored_ids


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


def inspect_json(run, path: object, *options: object) -> dict[str, object]:
    return json.loads(run("inspect", path, *options, "--json").stdout)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_quantization_error_is_that_of_the_exact_values(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, "--top-k", 8, "--precision", "standard", "-o", tmp_path / "c")
    found = inspect_json(run, tmp_path / "c")["statistics"]
    assert 0 < found["quantization_kl_nats"] < 0.01
    run("cache-teacher", pair.teacher, corpus, "--top-k", 8, "--precision", "float32", "-o", tmp_path / "exact")
    exact, stored = TeacherCache(tmp_path / "exact"), TeacherCache(tmp_path / "c")
    divergence = sum(
        kl_on_stored_ids(one.stored_logprobs, other.stored_logprobs).sum()
        for one, other in zip(exact, stored, strict=True)
    )
    assert divergence / found["positions"] == pytest.approx(found["quantization_kl_nats"], rel=0.02)


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
