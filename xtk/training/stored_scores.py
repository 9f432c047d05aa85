"""What a teacher said about a rollout batch, stored with it if the teacher would say something else in a resumed run.

Servers and vLLM round differently each time, and the weights of a teacher that is the student change with each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.cache.reader import open_verified_shard
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.teacher_document import TeacherDocument
from xtk.data.corpus_reader import CorpusFingerprint
from xtk.errors import CorruptError
from xtk.files.atomic_files import atomic_write
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.text.document import Document


class StoredScores:
    """The shards of one teacher in the folder of a rollout batch, one for each part that is scored at once.

    Args:
        folder: of the rollout batch; None: nothing is stored or read.
        number: index of the teacher.
        parts: the documents of each part.
    """

    def __init__(
        self, folder: Path | None, number: int, teacher: OnlineTeacher, parts: Sequence[Sequence[Document]]
    ) -> None:
        self._folder = None if teacher.scores_repeat else folder
        self._teacher, self._number, self._parts = teacher, number, parts
        self._shards: dict[int, CacheShard] = {}

    def read(self) -> dict[int, list[TeacherDocument]]:
        """Return the documents of the parts that are stored; parts that are damaged or of other documents are not."""
        for part in range(len(self._parts)) if self._folder is not None else ():
            path = self._path(part)
            try:
                if path.is_file() and (shard := open_verified_shard(path, str(path))).header == self._header(part):
                    shard.load_bytes_of = lambda: self._teacher.teacher_tokenizer.vocabulary.bytes_of
                    self._shards[part] = shard
            except CorruptError as failure:
                terminal.note(f"distill: {failure.where}: {failure.what}; scoring these documents again")
        return {part: [shard.read_document(row) for row in range(len(shard))] for part, shard in self._shards.items()}

    def write(self, part: int, documents: Sequence[TeacherDocument]) -> None:
        """Store what the teacher said about the documents of a part."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path(part)) as temporary:
                write_shard(temporary, self._header(part), ShardPosition(part, 0, len(documents)), documents)

    def _path(self, part: int) -> Path:
        assert self._folder is not None
        return self._folder / f"scores-{self._number:05d}-{part:05d}.arrow"

    def _header(self, part: int) -> dict[str, Any]:
        data = {"fingerprint": str(CorpusFingerprint.of(self._parts[part]))}
        return {**self._teacher.header, "data": data}
