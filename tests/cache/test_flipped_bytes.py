"""Every changed byte of a cache is detected: in each file, at each position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_teacher_cache import HEADER, random_row

from xtk.cache.reader import TeacherCache
from xtk.cache.writer import ShardedCacheWriter
from xtk.errors import CorruptError, XtkError
from xtk.files.storage_folders import LocalFolder
from xtk.text.document import Document

TEXTS = [["Anna has 12.", "日本 é"], ["Ida"]]
FILES = {"tokenizer.json": b'{"model": {}}', "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("flips") / "cache"
    rng = np.random.default_rng(0)
    writer = ShardedCacheWriter(LocalFolder(folder), HEADER, [len(texts) for texts in TEXTS])
    for number, texts in enumerate(TEXTS):
        writer.write_shard(number, [random_row(Document.from_text(text), 2, rng) for text in texts])
    writer.write_shared_files(FILES)
    writer.finish()
    return folder


def assert_detected(folder: Path, path: Path) -> None:
    """Check that `verify` raises an error that names the file, and that reading does if it is a shard."""
    with pytest.raises(XtkError) as raised:
        TeacherCache(folder).verify()
    # The version is in the manifest too, and is checked before the checksum.
    assert isinstance(raised.value, CorruptError) or "this xtk reads version" in raised.value.what
    assert path.name in raised.value.where
    assert raised.value.hint
    if path.suffix == ".arrow":
        with pytest.raises(CorruptError) as raised:
            list(TeacherCache(folder))
        assert path.name in raised.value.where


def test_intact_cache_is_verified(cache):
    TeacherCache(cache).verify()


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.arrow", "shard-00001.arrow", *FILES])
def test_flipped_byte_is_detected_at_every_position(cache, name, step):
    path = cache / name
    raw = path.read_bytes()
    rng = np.random.default_rng(len(raw))
    try:
        with path.open("r+b", buffering=0) as stream:
            for position in range(0, len(raw), step):
                stream.seek(position)
                stream.write(bytes([raw[position] ^ int(rng.integers(1, 256))]))
                assert_detected(cache, path)
                stream.seek(position)
                stream.write(raw[position : position + 1])
    finally:
        path.write_bytes(raw)
    TeacherCache(cache).verify()


def test_changed_white_space_in_the_manifest_is_detected(cache):
    path = cache / "manifest.json"
    raw = path.read_bytes()
    try:
        for changed in (raw.replace(b"\n", b" ", 1), raw + b"\n", raw.replace(b",", b", ", 1)):
            path.write_bytes(changed)
            assert_detected(cache, path)
    finally:
        path.write_bytes(raw)


def test_missing_tokenizer_file_is_detected(cache):
    for name, content in FILES.items():
        (cache / name).unlink()
        assert_detected(cache, cache / name)
        (cache / name).write_bytes(content)
