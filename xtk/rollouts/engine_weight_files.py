"""Weight sync between training and generation engines: weight names, and tied output heads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from xtk.errors import MismatchError
from xtk.models.safetensors_headers import weight_files

HEAD_FILE, INDEX_FILE = "output-head.safetensors", "model.safetensors.index.json"
HEAD_NAME = "lm_head.weight"
_OTHER_HEADS = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\..*|output\.weight")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings?)\.weight")


@dataclass(frozen=True)
class WeightNames:
    """The weight names of a model."""

    names: frozenset[str]  # all names; empty if unknown (a folder without safetensors)

    @classmethod
    def from_folder(cls, folder: Path) -> WeightNames:
        """Return the names in the safetensors files of a folder from which transformers loads its weights.

        Mistral's folders have all weights a second time, in `consolidated.safetensors`, with other names.
        """
        from safetensors import safe_open

        names: set[str] = set()
        heads = [folder / HEAD_FILE] if (folder / HEAD_FILE).is_file() else []
        for path in dict.fromkeys([*weight_files(folder), *heads]):
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        return cls(frozenset(names))

    @property
    def tied_embedding(self) -> str | None:
        """The input embedding that is also the output head (tied weights); None: the head is stored, or unknown."""
        if any(map(_OTHER_HEADS.fullmatch, self.names)):
            return None
        embeddings = [name for name in self.names if _EMBEDDING.fullmatch(name)]
        return embeddings[0] if len(embeddings) == 1 else None

    def check_complete(self, received: WeightNames, where: str) -> None:
        """Refuse incomplete weights: an engine would silently keep its old ones.

        A tied output head must be included, whether or not the model's files have it (see `write_tied_head`).
        """
        if not self.names:
            return
        wanted = self.names if self.tied_embedding is None else self.names | {HEAD_NAME}
        missing = wanted - received.names
        other = received.names - self.names - {HEAD_NAME}
        if missing or other:
            words = [f"missing: {sorted(missing)[0]}"] if missing else []
            words += [f"unknown: {sorted(other)[0]}"] if other else []
            raise MismatchError(
                f"the new weights do not match the model: {len(missing):,} are missing, {len(other):,} are unknown",
                where=f"{where}: {', '.join(words)}",
                hint="add the tied output head with xtk.rollouts.engine_weight_files.write_tied_head"
                if missing == {HEAD_NAME}
                else "pass all weights of the same model",
            )


def write_tied_head(folder: Path) -> None:
    """Write a missing tied output head into a folder of safetensors, as a separate file.

    vLLM's `reload_weights` (0.32, on CPU) stores a tied head separately from the embedding, and keeps the old head
    when new weights come without one.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    tied = WeightNames.from_folder(folder).tied_embedding
    if tied is None:
        return
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if tied in file.keys():  # noqa: SIM118 (not a mapping)
                head = file.get_tensor(tied)
    save_file({HEAD_NAME: head}, folder / HEAD_FILE, metadata={"format": "pt"})
    index = folder / INDEX_FILE
    if index.is_file():  # vLLM reads only the files that it names
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"][HEAD_NAME] = HEAD_FILE
        index.write_text(json.dumps(content), encoding="utf-8")
