"""Fixtures of all tests: small models and tokenizers, made once per session; xtk as a process; real data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import folder_differences
import small_inputs
import xtk_processes
from object_store import ObjectStore
from tokenizer_families import Families

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XTK_CACHE"] = tempfile.mkdtemp(prefix="xtk-cache-")  # never the cache of the user
for name in ("HF_MODULES_CACHE", "HF_DATASETS_CACHE"):
    os.environ[name] = str(Path(os.environ["XTK_CACHE"], name.lower()))
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# A shell starts a command in the background with SIGINT ignored, as `nohup` does with SIGHUP, and processes that tests
# start would inherit that. Python's handler is reset to the default action when a process is started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

xtk_processes.start_fork_server()


# Each takes minutes. All tests of a module run in the same worker, because they share slow fixtures.
SLOWEST_MODULES = ("test_interruptions", "test_layouts", "test_several_writers", "test_bad_input", "test_parity",
                   "test_on_policy", "test_loss_contract", "test_cache_teacher", "test_losses", "test_command_contract",
                   "test_remote_caches", "test_online_teacher", "test_doctor", "test_teachers", "test_align_statistics",
                   "test_rollout", "test_inspect_caches")  # fmt: skip


def pytest_sessionfinish() -> None:
    """Delete the temporary cache folder."""
    shutil.rmtree(os.environ["XTK_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest modules first, so that no worker still runs one of them when the others have finished."""
    order = {name: index for index, name in enumerate(SLOWEST_MODULES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(SLOWEST_MODULES)))


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """List the files that differ between two folders instead of their contents, which would fill the log."""
    if op == "==" and folder_differences.are_folders(left, right):
        return ["the files are those of the other folder", *folder_differences.difference_lines(left, right)]
    return None


Pair = small_inputs.Pair
RunXtk = Callable[..., subprocess.CompletedProcess[str]]
run_xtk = xtk_processes.run_xtk


@pytest.fixture(scope="session")
def run() -> RunXtk:
    return run_xtk


@pytest.fixture(scope="session")
def material_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("material")


@pytest.fixture(scope="session")
def pair(material_folder: Path) -> Pair:
    """Two small models: a Llama that splits numbers into groups of three digits, a Qwen3 with single digits."""
    return Pair(
        small_inputs.make_student(material_folder / "student"), small_inputs.make_teacher(material_folder / "teacher")
    )


@pytest.fixture(scope="session")
def metaspace(material_folder: Path) -> Path:
    """A SentencePiece-like tokenizer."""
    return small_inputs.make_metaspace_tokenizer(material_folder / "metaspace")


@pytest.fixture(scope="session")
def families(material_folder: Path) -> Families:
    """A tokenizer of every family, without models."""
    return Families(material_folder / "families")


@pytest.fixture(scope="session")
def corpus(material_folder: Path) -> Path:
    """Forty short documents."""
    return small_inputs.write_jsonl(material_folder / "corpus.jsonl", small_inputs.sentences(40, seed=3))


@pytest.fixture(scope="session")
def cache(pair: Pair, corpus: Path, material_folder: Path) -> Path:
    """A teacher cache of the corpus, in several shards."""
    folder = material_folder / "cache"
    run_xtk("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", folder)
    return folder


@pytest.fixture(scope="session")
def projection(pair: Pair, material_folder: Path) -> Path:
    """A projection from the student's to the teacher's vocabulary."""
    path = material_folder / "p.safetensors"
    run_xtk("build-projection", pair.student, pair.teacher, "-o", path)
    return path


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A local S3 server with a bucket named `bucket`; this process and its child processes are configured to use it."""
    pytest.importorskip("moto", reason="there is no S3 server on this machine: pip install 'moto[s3]' flask flask-cors")
    s3fs = pytest.importorskip("s3fs", reason="pip install s3fs")
    server = ObjectStore(tmp_path_factory.mktemp("store") / "server")
    os.environ.update(server.env)
    try:
        s3fs.S3FileSystem().mkdir("bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real tokenizers and corpora."""
    folder = os.environ.get("XTK_DATA")
    if not folder:
        pytest.skip("XTK_DATA does not point to real tokenizers and corpora")
    return Path(folder)
