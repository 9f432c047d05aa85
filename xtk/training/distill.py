"""From the inputs of `xtk distill` to a finished student: what is checked before, and in which processes it runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.artifacts.corpus import Corpus, Fingerprint
from xtk.artifacts.files import canonical_json, sha256
from xtk.artifacts.folders import is_remote
from xtk.artifacts.hub import fingerprint_of_weights
from xtk.artifacts.locks import only_writer
from xtk.artifacts.projection_file import read_projection
from xtk.artifacts.projection_store import projection_for
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.errors import Mismatch, XtkError
from xtk.losses.cells import Ground, Loss
from xtk.projection.build import identity
from xtk.projection.next_bytes import next_bytes
from xtk.projection.projection import SIDE, Projection, named
from xtk.tokens.rewriting import rewriting
from xtk.tokens.sequence import left_out, sequences, told_rewritten
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batches import BatchMaker, CacheSource, Objective, Order, Source, TextSource
from xtk.training.recipe import Places, Recipe, Reporting

METHOD = "multitoken"  # of projections that nobody named
PAIRING = "exact"  # of the pairs of tokens that spell the same
LOOKED_AT = 1000


@dataclass(frozen=True)
class Inputs:
    """Everything that a run reads, checked against each other.

    Attributes:
        source: documents, with the teacher's word on them.
        tokenizer: the student's.
        objectives: the losses of the recipe.
        identity: names what the inputs are: fingerprints.
    """

    source: Source
    tokenizer: Tokenizer
    objectives: tuple[Objective, ...]
    identity: dict[str, Any]


def default_losses(places: Places, tokenizer: Tokenizer) -> list[str]:
    """Return the losses of a run that names none: those for the teacher's tokenizer, the student's own or another."""
    if places.projection is None and is_cache(places.cache):
        same = TeacherCache(places.cache).header["teacher"]["tokenizer"] == tokenizer.fingerprint
        return ["ce", "forward-kl" if same else "p-kl"]
    return ["ce", "p-kl" if places.projection is not None else "forward-kl"]


def open_inputs(places: Places, recipe: Recipe, tokenizer: Tokenizer) -> Inputs:
    """Open a cache and a projection, and check that they and the student belong together.

    Raises:
        XtkError: one of them cannot be read, or they do not fit each other.
    """
    local_cache = None if is_remote(places.cache) else Path(places.cache)
    for path in (places.student, local_cache, places.projection):
        if path is not None and places.output.resolve() in (path.resolve(), *path.resolve().parents):
            raise XtkError("the output is one of the inputs, or holds it", where=str(path), hint="another -o")
    losses = tuple(loss.rule() for loss in recipe.losses)
    weights = {"weights": fingerprint_of_weights(places.student), "tokenizer": tokenizer.fingerprint}
    if all(loss.ground == "text" for loss in losses) and not is_cache(places.cache):
        documents = list(Corpus([places.cache], places.columns))
        fingerprint = Fingerprint()
        for document in documents:
            fingerprint.add(document)
        given = {"student": weights, "documents": str(fingerprint)}
        alone = tuple(
            Objective(rule, loss.divergence(), None) for loss, rule in zip(recipe.losses, losses, strict=True)
        )
        return Inputs(TextSource(documents), tokenizer, alone, given)
    cache = TeacherCache(places.cache)
    projection = None
    if places.projection is not None:
        projection = read_projection(places.projection)
        _check_pair(places, tokenizer, cache, projection)
    elif any(loss.ground == "projection" for loss in losses):
        projection = projection_for(tokenizer, cache.teacher, METHOD)
    width = int(cache.header["teacher"]["width"])
    _check_support(recipe, losses, places, cache)
    objectives = tuple(
        Objective(rule, loss.divergence(), _ground(loss.name, rule, places, tokenizer, cache, projection, width))
        for loss, rule in zip(recipe.losses, losses, strict=True)
    )
    inputs = {
        "student": weights,
        "cache": sha256(canonical_json(cache.manifest)),
        "projection": None if projection is None else _fingerprint(projection),
    }
    return Inputs(CacheSource(cache), tokenizer, objectives, inputs)


def _fingerprint(projection: Projection) -> str:
    return sha256(projection.row_offsets.tobytes() + projection.teacher_ids.tobytes() + projection.weights.tobytes())


def _check_pair(places: Places, tokenizer: Tokenizer, cache: TeacherCache, projection: Projection) -> None:
    """Refuse a projection of another pair. Chat templates may differ: no projection depends on them."""
    hint = "xtk build-projection STUDENT TEACHER -o ..., with this student and the teacher of this cache"
    built_for, student = projection.header["student"], identity(tokenizer)
    if any(built_for.get(key) != student[key] for key in SIDE):
        raise Mismatch(
            "this projection was built for another student",
            where=f"{places.projection} is for {named(built_for)}; {places.student} has {named(student)}",
            hint=hint,
        )
    built_for, teacher = projection.header["teacher"], cache.header["teacher"]
    # A cache need not tell the roles; its width is no matter, padded rows are reached by nothing.
    if any(built_for.get(key) != teacher[key] for key in ("tokenizer", "roles") if key in teacher):
        raise Mismatch(
            "this projection was built for another teacher",
            where=f"{places.projection} is for {named(built_for)}; the cache {places.cache} is from {_short(teacher)}",
            hint=hint,
        )


def _check_support(recipe: Recipe, losses: tuple[Loss, ...], places: Places, cache: TeacherCache) -> None:
    """Refuse a support that does not hold what a loss asks for, and estimates that it would take for probabilities."""
    support = str(cache.header["options"].get("support"))
    where = f"{places.cache} has the support {support}"
    for loss, rule in zip(recipe.losses, losses, strict=True):
        if rule.asks == "ranks" and support not in ("top-k", "top-p"):
            raise XtkError(
                f"the loss {loss} asks for the likeliest tokens, with their exact probabilities",
                where=where,
                hint="a cache with --support top-k or top-p",
            )
        if rule.asks == "distribution" and support == "none":
            raise XtkError(
                f"the loss {loss} asks for distributions, not only for the tokens that stand there",
                where=where,
                hint="a cache with --support top-k, or --loss alm",
            )
        if "sample" in support and rule.asks == "distribution" and not loss.divergence().linear:
            raise XtkError(
                f"the loss {loss} cannot learn from draws: estimates have no bias for forward-kl at temperature 1 only",
                where=where,
                hint="a cache with --support top-k, or the divergence forward-kl",
            )


def _short(side: dict[str, Any]) -> str:
    return f"{str(side['tokenizer'])[:15]} ({side['name']})"


def _ground(
    name: str,
    rule: Loss,
    places: Places,
    tokenizer: Tokenizer,
    cache: TeacherCache,
    projection: Projection | None,
    width: int,
) -> Ground:
    if rule.ground in ("text", "spans"):
        return None
    if rule.ground == "pairs":
        return projection_for(tokenizer, cache.teacher, PAIRING).columns.widened(width)
    if rule.ground == "bytes":
        return next_bytes(tokenizer, cache.teacher)
    if rule.ground == "tokens":
        if cache.header["teacher"]["tokenizer"] != tokenizer.fingerprint:
            raise Mismatch(
                f"the loss {name} is for a teacher with the student's own tokenizer",
                where=f"{places.student} has {tokenizer.fingerprint[:15]}; "
                f"the cache {places.cache} is from {_short(cache.header['teacher'])}",
                hint="--loss byte-kl, p-kl or boundary-kl",
            )
        return Projection.identity(len(tokenizer)).columns.widened(width)
    assert projection is not None
    return projection.columns.widened(width)


def identity_of(recipe: Recipe, inputs: Inputs, processes: int) -> dict[str, Any]:
    """Return what makes two runs the same run."""
    return {**recipe.identity(processes), "inputs": inputs.identity}


def distill(
    places: Places, recipe: Recipe, reporting: Reporting, inputs: Inputs, *, force: bool, trust_remote_code: bool
) -> dict[str, Any]:
    """Train a student in this process, which may be one of several.

    Returns:
        What the run's `xtk.json` says: steps, recipe, last metrics.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import InitProcessGroupKwargs, set_seed

    from xtk.models.causal_lm import Cut, check_rows, context_length, load_causal_lm, quieten_transformers
    from xtk.training.checkpoint import begin_run, checkpoints, find_run
    from xtk.training.loop import Run, train

    quieten_transformers()
    for name in reporting.report_to:
        if name not in {str(tracker.value) for tracker in get_available_trackers()}:
            raise XtkError(
                f"there is no tracker called {name} here", hint=f"pip install {name}, or another --report-to"
            )
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=list(reporting.report_to) or None,
        project_dir=str(places.output / "trackers") if reporting.report_to else None,
        # The others wait while the first process evaluates and saves.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=4))],
    )
    terminal.set_main_process(accelerator.is_main_process)
    identity = identity_of(recipe, inputs, accelerator.num_processes)
    finished = find_run(places.output, identity, force=force)
    if finished is not None:
        return finished
    found = [] if force else checkpoints(places.output)
    set_seed(recipe.seed)
    model = load_causal_lm(
        found[-1][1] if found else places.student, device=accelerator.device, trust_remote_code=trust_remote_code
    )
    check_rows(model, inputs.tokenizer)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    limits = [limit for limit in (context_length(model.config), recipe.max_length) if limit]
    limit = min(limits) if limits else None
    documents, sizes = _documents(recipe, inputs, limit)
    with contextlib.ExitStack() as held:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            held.enter_context(only_writer(places.output, "student"))
            begin_run(places.output, identity, force=force)
        accelerator.wait_for_everyone()
        if reporting.report_to:
            accelerator.init_trackers("xtk", config={"recipe": canonical_json(identity)})
        run = Run(
            accelerator=accelerator,
            cut=Cut(model),
            tokenizer=inputs.tokenizer,
            maker=BatchMaker(inputs.source, inputs.tokenizer, inputs.objectives, limit),
            order=Order(documents, sizes, recipe.documents_per_step(accelerator.num_processes), recipe.seed),
            recipe=recipe,
            reporting=reporting,
            steps=recipe.steps(len(documents), accelerator.num_processes),
            output=places.output,
            tokenizer_folder=places.student,
        )
        terminal.note(
            f"distill: {run.steps:,} steps of {recipe.documents_per_step(accelerator.num_processes)} documents, "
            f"{len(documents):,} documents, {accelerator.num_processes} process(es) on {accelerator.device.type}"
        )
        return train(run, identity)


def _tell_rewritten(inputs: Inputs, documents: np.ndarray) -> None:
    """Tell what the student's tokenizer or chat template does not read as it is, in documents all over the cache."""
    sample = documents[:: -(-len(documents) // LOOKED_AT) or 1]
    read = [inputs.source.read(int(number))[0] for number in sample]
    texts = [document.text for document in read if document.conversation is None]
    if warning := rewriting(inputs.tokenizer, texts).warning():
        terminal.note(f"distill: {warning}")
    talks = [document for document in read if document.conversation is not None]
    counts = [left_out(*pair) for pair in zip(talks, sequences(inputs.tokenizer, talks), strict=True)]
    if sum(counts):
        terminal.note("distill: " + told_rewritten(counts))


def _longer_than(limit: int, inputs: Inputs, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Return (tokens, number) of the documents of more than `limit` tokens.

    A text has at most a token a byte, and two at its ends: only texts that may be longer are tokenised. What a
    template adds to a conversation is not known before.
    """
    found = []
    talks = inputs.source.conversations()
    candidates = np.flatnonzero((sizes + 2 > limit) | talks)
    for start in range(0, len(candidates), LOOKED_AT):
        numbers = candidates[start : start + LOOKED_AT].tolist()
        documents = [inputs.source.read(number)[0] for number in numbers]
        for number, sequence in zip(numbers, sequences(inputs.tokenizer, documents), strict=True):
            if len(sequence) > limit:
                found.append((len(sequence), number))
    return found


def _documents(recipe: Recipe, inputs: Inputs, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents to train on, and all sizes; those that are too long are counted and told."""
    sizes = inputs.source.text_bytes()
    documents = np.flatnonzero(sizes > 0)
    _tell_rewritten(inputs, documents)
    too_long = [] if limit is None else _longer_than(limit, inputs, sizes)
    if too_long:
        longest, number = max(too_long)
        told = (
            f"{len(too_long):,} of {len(sizes):,} documents are longer than the {limit:,} tokens that the student reads"
        )
        if recipe.long_documents == "refuse":
            raise XtkError(
                told,
                where=f"the longest is row {number} of the cache with {longest:,} tokens",
                hint="--long-documents truncate or skip",
            )
        terminal.note(f"distill: {told}: --long-documents {recipe.long_documents}")
        if recipe.long_documents == "skip":
            documents = np.setdiff1d(documents, [number for _, number in too_long])
    if not len(documents):
        raise XtkError("there is no document to train on")
    return documents, sizes
