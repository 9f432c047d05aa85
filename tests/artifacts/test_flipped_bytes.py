"""Any byte of a cache that is not what was written is found: in every file, at every position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_teacher_cache import row_of

from xtk.artifacts.cache_writer import ShardedCacheWriter
from xtk.artifacts.storage_folders import LocalFolder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import CorruptError, XtkError
from xtk.tokens.document import Document

HEADER = {
    "codec": {"name": "raw", "num_samples": 5, "num_sample_sets": 2},
    "teacher": {"name": "t", "tokenizer": "x", "weights": "y"},
}
TEXTS = [["Anna has 12.", "日本 é"], ["Ida"]]
FILES = {"tokenizer.json": b'{"model": {}}', "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flips") / "cache"
    draw = np.random.default_rng(0)
    writer = ShardedCacheWriter(LocalFolder(folder), HEADER, [len(texts) for texts in TEXTS])
    for number, texts in enumerate(TEXTS):
        writer.write_shard(number, [row_of(Document.from_text(text), 2, draw) for text in texts])
    writer.write_shared_files(FILES)
    writer.finish()
    return folder


def assert_found(folder: Path, path: Path) -> None:
    """Verifying finds it, and names the file; so does reading, of a shard."""
    with pytest.raises(XtkError) as caught:
        TeacherCache(folder).verify()
    # The version stands in the manifest too, and is looked at before its checksum.
    assert isinstance(caught.value, CorruptError) or "this xtk reads version" in caught.value.what
    assert path.name in caught.value.where
    assert caught.value.hint
    if path.suffix == ".arrow":
        with pytest.raises(CorruptError) as caught:
            list(TeacherCache(folder))
        assert path.name in caught.value.where


def test_the_whole_cache_is_whole(cache):
    TeacherCache(cache).verify()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.arrow", "shard-00001.arrow", *FILES])
def test_a_flipped_byte_is_found_wherever_it_is(cache, name, every):
    path = cache / name
    raw = path.read_bytes()
    draw = np.random.default_rng(len(raw))
    try:
        with path.open("r+b", buffering=0) as stream:
            for position in range(0, len(raw), every):
                stream.seek(position)
                stream.write(bytes([raw[position] ^ int(draw.integers(1, 256))]))
                assert_found(cache, path)
                stream.seek(position)
                stream.write(raw[position : position + 1])
    finally:
        path.write_bytes(raw)
    TeacherCache(cache).verify()


def test_white_space_that_json_does_not_mind_is_found_in_the_manifest(cache):
    path = cache / "manifest.json"
    raw = path.read_bytes()
    try:
        for altered in (raw.replace(b"\n", b" ", 1), raw + b"\n", raw.replace(b",", b", ", 1)):
            path.write_bytes(altered)
            assert_found(cache, path)
    finally:
        path.write_bytes(raw)


def test_a_lost_tokenizer_file_is_found(cache):
    for name, content in FILES.items():
        (cache / name).unlink()
        assert_found(cache, cache / name)
        (cache / name).write_bytes(content)
