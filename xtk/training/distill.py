"""From the inputs of `xtk distill` to a finished student: what is checked before, and in which processes it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.corpus import Corpus, Fingerprint, is_data
from xtk.artifacts.files import canonical_json, sha256
from xtk.artifacts.folders import is_remote
from xtk.artifacts.hub import fingerprint_of_weights
from xtk.artifacts.locks import only_writer
from xtk.artifacts.outputs import check_folder
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.errors import Mismatch, XtkError
from xtk.lookup import lookup
from xtk.losses import AUTO, LOSSES
from xtk.losses.objective import Objective
from xtk.projection.projection import Projection
from xtk.rollouts.prompts import prompt_ids
from xtk.rollouts.rollout import Prompt
from xtk.teachers.live import LiveTeacher
from xtk.tokens.document import Document
from xtk.tokens.rewriting import rewriting
from xtk.tokens.sequence import left_out, sequences, told_rewritten
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batches import BatchMaker, Order
from xtk.training.card import Lineage, name_of
from xtk.training.combining import Combination, Weighing, read_combination
from xtk.training.live import Blocks, LiveSource, blocks_of, read_for, read_prompts_for
from xtk.training.metrics import metric
from xtk.training.on_policy import OnPolicy, RoundOrder
from xtk.training.recipe import Places, Recipe, Reporting
from xtk.training.rounds import Rounds, RoundSource
from xtk.training.sources import CacheSource, MixtureSource, Source, TextSource, matched, routed
from xtk.training.teachers import Taken, Teacher, open_teachers, take_losses

if TYPE_CHECKING:
    import torch
    from torch import nn

    from xtk.models.causal_lm import Cut
    from xtk.models.preparation import Origin
    from xtk.training.eval_tasks import Examination
    from xtk.training.held_out import Evaluation, HeldOut
    from xtk.training.layout import Layout
    from xtk.training.loop import Run

LOOKED_AT = 1000
TRACKERS = "trackers"


@dataclass(frozen=True)
class Inputs:
    """Everything that a run reads, checked against each other.

    Attributes:
        source: documents, with the teachers' words on them.
        tokenizer: the student's.
        objectives: the terms of the sum.
        identity: what makes two runs of one recipe different: losses, fingerprints of the inputs.
        teachers: how metrics call them.
        weighing: how weights of teachers come from what they say; None: they do not.
        chosen: what `--loss auto` took and why; "": nothing was left to it.
        held_out: what the student is asked about held-out documents of caches; None: there are none.
        origin: what the student comes from.
        of_data: whether losses on the student alone are about documents that it did not write.
    """

    source: Source
    tokenizer: Tokenizer
    objectives: tuple[Objective, ...]
    identity: dict[str, Any]
    teachers: tuple[str, ...] = ()
    weighing: Weighing | None = None
    chosen: str = ""
    held_out: HeldOut | None = None
    origin: Lineage = field(default_factory=Lineage)
    of_data: bool = False

    def maker(self, limit: int | None, packing: int = 0) -> BatchMaker:
        """Return what makes micro-batches.

        Args:
            limit: tokens of a document at most.
            packing: how many tokens a row of documents is a multiple of; 0: each document has a row of its own.
        """
        return BatchMaker(
            self.source, self.tokenizer, self.objectives, limit, self.weighing, self.teachers, packing,
            of_data=self.of_data,
        )  # fmt: skip


def open_inputs(places: Places, recipe: Recipe, tokenizer: Tokenizer) -> Inputs:
    """Open caches and projections, and check that they and the student belong together.

    Raises:
        XtkError: one of them cannot be read, or they do not fit each other.
    """
    local = [Path(cache) for cache in places.caches if not is_remote(cache)]
    models = [places.student, *(teacher.request.teacher for teacher in places.teachers)]
    models += [places.adapter] if places.adapter else []
    check_folder(places.output, "a student", (*models, *local, *places.projections))
    student = {"weights": fingerprint_of_weights(places.student), "tokenizer": tokenizer.fingerprint}
    if places.adapter:
        student["adapter"] = fingerprint_of_weights(places.adapter)
    alone = all(loss.name != AUTO and _on_text(loss.name) for loss in recipe.losses)
    live = places.teachers
    on_policy = recipe.on_policy
    if on_policy is not None and not live:
        raise XtkError("nobody scores what the student writes", hint="--teacher MODEL beside --on-policy")
    plain = alone and not live and not any(is_cache(cache) for cache in places.caches)
    speakers = 1 if plain else len(live or places.caches)
    combination = read_combination(recipe.teachers, recipe.teacher_weights, speakers)
    if plain and places.eval_caches:
        raise XtkError(
            "held-out caches are for losses that are about teachers", where=places.eval_caches[0],
            hint="--eval-data with the documents themselves",
        )  # fmt: skip
    if plain:
        return _of_texts(places, recipe, tokenizer, student)
    corpus = Corpus(list(places.caches), places.columns, places.max_document_bytes) if live else None
    if corpus is None:
        _check_caches(places, recipe)
    else:
        _check_live(places, alone=alone)
        if on_policy is not None:
            prompts = read_prompts_for(live, corpus, on_policy.form)
        else:
            documents, sizes = read_for(live, corpus, routed=combination.way == "route")
    teachers = open_teachers(places.caches, places.projections, tokenizer, live)
    taken, chosen = take_losses(recipe.losses, teachers, rollouts=on_policy is not None)
    _check_balance(recipe, taken)
    if combination.way == "mixture":
        _check_mixable(teachers)
    names = _names(combination, teachers)
    source: Source
    if corpus is None:
        source = _of_caches(combination, teachers)
    elif on_policy is not None:
        source = _of_rounds(on_policy, prompts, corpus, combination, teachers, tokenizer)
    else:
        source = LiveSource(documents, live, sizes, places.columns, partial(_joined, combination))
    if combination.way == "mixture":
        taken = _of_mixture(taken, teachers)
    objectives = tuple(_objective(one, combination, teachers, names) for one in taken)
    held_out = None
    if places.eval_caches:
        held_out = _held_out(places, combination, teachers, taken, objectives, tokenizer)
    return Inputs(
        source,
        tokenizer,
        objectives,
        {
            "losses": [_told(one, names) for one in taken],
            "inputs": {
                "student": student,
                **_read(taken, teachers),
                **({"prompts": source.fingerprint()} if isinstance(source, RoundSource) else {}),
            },
        },
        names,
        combination.weighing,
        chosen,
        held_out,
        Lineage(name_of(places.student), [one.identity for one in teachers], _data_of(teachers)),
        of_data=on_policy is not None,
    )


def _of_rounds(
    on_policy: OnPolicy,
    prompts: Sequence[Prompt],
    corpus: Corpus,
    combination: Combination,
    teachers: Sequence[Teacher],
    tokenizer: Tokenizer,
) -> RoundSource:
    """Return what the student writes, and, where some steps take them, the documents of the data."""
    talk = next((one.document for one in prompts if one.document.conversation is not None), None)
    if talk is not None and on_policy.environment:  # which has the first word, so that a template may refuse this alone
        _ = tokenizer.chat_template
    elif talk is not None:
        prompt_ids(tokenizer, [talk], on_policy.chat_template_kwargs)
    data: list[Document] = []
    if on_policy.lmbda < 1:
        form = on_policy.form
        data = [form.answered(record, corpus.columns, where) for record, where in corpus.records()]
        unanswered = next((at for at, one in enumerate(data) if not any(part.train for part in one.segments)), None)
        if len(data) != len(prompts) or unanswered is not None:
            raise XtkError(
                "--lmbda below 1 takes completions of the data too, and a prompt has none",
                where=f"{corpus.name}, document {unanswered or 0}",
                hint="prompt and completion, or messages that end with the assistant's",
            )
    images = [None if one.has_students_tokenizer or one.support != "given" else one.projection for one in teachers]
    return RoundSource(
        prompts,
        data,
        on_policy.num_generations,
        tokenizer,
        [one.cache for one in teachers if isinstance(one.cache, LiveTeacher)],
        [one.name for one in teachers] if combination.way == "route" else [],
        images,
        partial(_joined, combination),
    )


def _held_out(
    places: Places,
    combination: Combination,
    teachers: Sequence[Teacher],
    taken: Sequence[Taken],
    objectives: tuple[Objective, ...],
    tokenizer: Tokenizer,
) -> HeldOut:
    """Open the caches of held-out documents: one of each teacher, in their order.

    Raises:
        XtkError: they are of other teachers, or a loss cannot be computed from one.
    """
    from xtk.training.held_out import HeldOut

    if len(places.eval_caches) != len(teachers):
        raise XtkError(
            f"there are {len(places.eval_caches)} held-out caches of {len(teachers)} teachers",
            where="--eval-data " + ", ".join(places.eval_caches),
            hint="one for each, in the order of the caches to train from",
        )
    held = open_teachers(places.eval_caches, (), tokenizer)
    for ours, theirs in zip(teachers, held, strict=True):
        if any(ours.identity[key] != theirs.identity[key] for key in ("tokenizer", "width")):
            raise Mismatch(
                "a held-out cache is of another teacher, with another vocabulary",
                where=f"{theirs.place} is from {theirs.name}; {ours.place} from {ours.name}",
                hint="xtk cache-teacher with the same teacher; caches in the same order",
            )
    for number, theirs in enumerate(held):
        refusals = [theirs.refusal(one.loss) for one in taken if one.teacher == number]
        if refusal := next(filter(None, refusals), None):
            raise refusal
    by_name = _names(combination, teachers)
    meetings = tuple(
        ours.meeting({one.rule.ground for one in taken if one.teacher == number}) if theirs.tells_likeliest else None
        for number, (ours, theirs) in enumerate(zip(teachers, held, strict=True))
    )
    source = _of_caches(combination, held)
    return HeldOut(source, objectives, by_name, combination.weighing, meetings[: len(by_name)])


def _on_text(name: str) -> bool:
    """Say whether a loss needs no teacher."""
    return bool(lookup(LOSSES, name, "loss").ground == "text")


def _of_texts(places: Places, recipe: Recipe, tokenizer: Tokenizer, student: dict[str, str]) -> Inputs:
    """Return the inputs of a run without a teacher."""
    taken, _ = take_losses(recipe.losses, [])
    _check_balance(recipe, taken)
    documents = list(Corpus(list(places.caches), places.columns, places.max_document_bytes))
    fingerprint = Fingerprint()
    for document in documents:
        fingerprint.add(document)
    identity = {
        "losses": [str(one.loss) for one in taken],
        "inputs": {"student": student, "documents": str(fingerprint)},
    }
    objectives = tuple(
        Objective(one.rule, one.loss.divergence(), None, one.loss.name, one.loss.weight) for one in taken
    )
    origin = Lineage(name_of(places.student), data=[str(fingerprint)])
    return Inputs(TextSource(documents), tokenizer, objectives, identity, origin=origin)


def _of_caches(combination: Combination, teachers: Sequence[Teacher]) -> Source:
    """Return the documents of all caches."""
    caches = [teacher.cache for teacher in teachers if isinstance(teacher.cache, TeacherCache)]
    if len(caches) == 1:
        return CacheSource(*caches)
    if combination.way == "route":
        return CacheSource(*caches, rows=routed(caches, [teacher.name for teacher in teachers]))
    return _joined(combination, caches, matched(caches))


def _names(combination: Combination, teachers: Sequence[Teacher]) -> tuple[str, ...]:
    """Return how metrics call who speaks."""
    return ("mixture",) if combination.way == "mixture" else tuple(teacher.name for teacher in teachers)


def _joined(combination: Combination, caches: Sequence[TeacherCache], rows: NDArray[np.int64]) -> Source:
    """Return the documents of caches, by where each holds them."""
    if combination.way == "mixture":
        return MixtureSource(*caches, rows=rows, weights=combination.weights)
    return CacheSource(*caches, rows=rows)


def _check_mixable(teachers: Sequence[Teacher]) -> None:
    first, *others = teachers
    for other in others:
        if other.identity["tokenizer"] != first.identity["tokenizer"]:
            raise Mismatch(
                "teachers with different tokenizers cannot be mixed: their probabilities are of different tokens",
                where=f"{first.place} and {other.place}",
                hint="--teachers sum, which compares each with the student",
            )


def _check_caches(places: Places, recipe: Recipe) -> None:
    """Refuse plain data for losses that need a teacher, and columns that caches have of their own."""
    for place in places.caches:
        if is_data(place):
            names = [loss.name for loss in recipe.losses if loss.name == AUTO or not _on_text(loss.name)]
            raise XtkError(
                f"--loss {names[0]} needs what a teacher assigns to the text, and this is plain data",
                where=place,
                hint=f"xtk cache-teacher TEACHER {place} -o CACHE, and CACHE here; or --teacher TEACHER; or --loss ce",
            )
    for name in ("weight", "route"):
        if name in places.columns:
            raise XtkError(
                f"a cache has the {name}s of its documents from cache-teacher; --{name}-column is for plain data",
                where=places.caches[0],
                hint=f"xtk cache-teacher ... --{name}-column {places.columns[name]}",
            )


def _check_live(places: Places, *, alone: bool) -> None:
    """Refuse live teachers of whom nothing is asked, or beside caches."""
    if alone:
        raise XtkError("none of the losses is about a teacher", hint="no --teacher, or --loss auto")
    for place in places.caches:
        if is_cache(place):
            raise XtkError(
                "--teacher scores plain data, and this is a cache",
                where=place,
                hint="the data that the cache was made from; or the cache, without --teacher",
            )


def _of_mixture(taken: Sequence[Taken], teachers: Sequence[Teacher]) -> list[Taken]:
    """Return the losses on the one word of all: those of the teacher who tells least, if they fit all.

    Raises:
        XtkError: one of them cannot learn from a teacher.
    """
    least = next((number for number, teacher in enumerate(teachers) if teacher.support == "none"), 0)
    of_all = [one for one in taken if one.teacher in (None, least)]
    for one in of_all:
        for teacher in teachers:
            if refusal := teacher.refusal(one.loss):
                raise refusal
    return [one if one.teacher is None else replace(one, teacher=0) for one in of_all]


def _objective(one: Taken, combination: Combination, teachers: Sequence[Teacher], names: tuple[str, ...]) -> Objective:
    rule, divergence, loss = one.rule, one.loss.divergence(), one.loss
    if one.teacher is None:
        return Objective(rule, divergence, None, loss.name, loss.weight)
    alone = combination.way in ("mixture", "route") or combination.weighing is not None
    return Objective(
        rule,
        divergence,
        teachers[one.teacher].ground(rule.ground),
        metric(loss.name, names[one.teacher], names),
        loss.weight,
        one.teacher,
        share=1.0 if alone else combination.weights[one.teacher],
        pool=("auto" if one.auto else loss.name) if combination.way == "route" else "",
    )


def _told(one: Taken, names: tuple[str, ...]) -> str:
    """Return how a recipe tells of a loss."""
    return str(one.loss) if one.teacher is None or len(names) == 1 else f"{one.loss} of {names[one.teacher]}"


def _read(taken: Sequence[Taken], teachers: Sequence[Teacher]) -> dict[str, Any]:
    """Return the fingerprints of caches (or of who is in their place), and of projections named or needed."""
    needed = {one.teacher for one in taken if one.rule.ground == "projection"}
    caches = [sha256(canonical_json(teacher.cache.manifest)) for teacher in teachers]
    kind = "teacher" if any(teacher.live for teacher in teachers) else "cache"
    projections = [
        _fingerprint(teacher.projection) if number in needed or teacher.named_projection else None
        for number, teacher in enumerate(teachers)
    ]
    if len(teachers) == 1:
        return {kind: caches[0], "projection": projections[0]}
    return {f"{kind}s": caches, "projections": projections}


def _data_of(teachers: Sequence[Teacher]) -> list[str]:
    """Return the fingerprints of what teachers read, each once."""
    headers = [teacher.cache.header["data"] for teacher in teachers]
    return list(dict.fromkeys(part["fingerprint"] for header in headers for part in header.get("sources", [header])))


def _fingerprint(projection: Projection) -> str:
    return sha256(projection.row_offsets.tobytes() + projection.teacher_ids.tobytes() + projection.weights.tobytes())


def _check_balance(recipe: Recipe, taken: Sequence[Taken]) -> None:
    """Refuse to balance what is not there."""
    both = {one.teacher is None for one in taken}
    if recipe.balance == "ce" and both != {True, False}:
        raise XtkError(
            "--balance ce brings what is about a teacher to the size of ce, and only one of the two is there",
            hint="--loss ce, and another --loss beside it",
        )


def identity_of(recipe: Recipe, inputs: Inputs, data_ranks: int, reporting: Reporting) -> dict[str, Any]:
    """Return what makes two runs the same run.

    Raises:
        XtkError: early stopping is asked for, and nothing is evaluated.
    """
    held_out: dict[str, Any] = {}
    if recipe.early_stopping_patience:
        if not ((reporting.eval_documents or inputs.held_out) and reporting.eval_steps):
            raise XtkError(
                "--early-stopping-patience counts evaluations, and there are none",
                hint="--eval-data DATA --eval-steps N",
            )
        fingerprint = Fingerprint()
        caches = None if inputs.held_out is None else inputs.held_out.source
        for document in reporting.eval_documents if caches is None else map(caches.document, range(len(caches))):
            fingerprint.add(document)
        held_out = {"eval_documents": str(fingerprint), "eval_steps": reporting.eval_steps}
    return {**recipe.identity(data_ranks), **inputs.identity, **held_out}


def distill(
    places: Places, recipe: Recipe, reporting: Reporting, inputs: Inputs, *, force: bool, trust_remote_code: bool,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a student in this process, which may be one of several.

    Args:
        places: where it reads and writes.
        recipe: what decides the result.
        reporting: what is logged and kept.
        inputs: of `open_inputs`.
        force: replace a run of another recipe.
        trust_remote_code: run the model's own Python code.
        options: the same as the options of a command line, which `recipe.json` keeps.

    Returns:
        What the run's `xtk.json` says: steps, recipe, last metrics.
    """
    from accelerate.utils import set_seed

    from xtk.models.causal_lm import context_length, quieten_transformers
    from xtk.models.preparation import Origin, can_be_merged, is_adapted
    from xtk.training.checkpoint import Resumed, begin_run, find_checkpoint, find_run
    from xtk.training.layout import read_layout
    from xtk.training.loader import killed_ones_told
    from xtk.training.loop import Run, train
    from xtk.training.processes import told_of_others
    from xtk.training.student import shared
    from xtk.training.trackers import start_trackers

    quieten_transformers()
    accelerator = _start(places, recipe, reporting)
    terminal.set_main_process(accelerator.is_main_process)
    layout = read_layout(recipe.parallel, accelerator.num_processes).on(accelerator.device)
    identity = identity_of(recipe, inputs, layout.data_ranks, reporting)
    finished = find_run(places.output, identity, force=force)
    if finished is not None:
        return finished
    keeps_best = recipe.early_stopping_patience > 0
    resumed = Resumed() if force else find_checkpoint(places.output, identity, best=keeps_best)
    set_seed(recipe.seed)
    origin = Origin(places.student, places.adapter, resumed.folder)
    cut = _load(origin, recipe, inputs, accelerator, layout, trust_remote_code)
    limits = [limit for limit in (context_length(cut.model.config), recipe.max_length) if limit]
    limit = min(limits) if limits else None
    documents, sizes = _documents(recipe, inputs, limit) if recipe.on_policy is None else _prompts(inputs)
    _check_teaching(recipe, places.teachers, layout, is_adapted(cut.model))
    packed = recipe.packing and cut.pack()
    if recipe.packing and not packed:
        terminal.note("distill: the student does not read documents in one row apart; each has a row of its own")
    if recipe.preparation.torch_compile:
        cut.compile_body()
    with contextlib.ExitStack() as held:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            held.enter_context(only_writer(places.output, "student"))
            begin_run(places.output, options or {}, identity, force=force)
        accelerator.wait_for_everyone()
        if reporting.report_to:
            start_trackers(accelerator, places.output / TRACKERS, resumed.step, identity)
        trained, parameters = shared(cut, accelerator, layout, packed=packed, offload=recipe.fsdp_offload)
        packing = layout.multiple if packed else 0
        per_step = recipe.documents_in_a_step(len(documents), layout.data_ranks)
        run = Run(
            accelerator=accelerator,
            layout=layout,
            cut=cut,
            model=trained,
            parameters=parameters,
            tokenizer=inputs.tokenizer,
            maker=inputs.maker(limit, packing),
            order=_order(recipe, documents, sizes, per_step),
            recipe=recipe,
            reporting=reporting,
            steps=recipe.steps(len(documents), layout.data_ranks),
            output=places.output,
            tokenizer_folder=places.student,
            evaluation=_evaluation(inputs, reporting, cut, trained, packing, layout, accelerator.device),
            examination=_examination(reporting, cut, inputs, recipe),
            origin=inputs.origin,
            merge=_merging(places, recipe, inputs, trust_remote_code) if can_be_merged(cut.model) else None,
        )
        run.resumed = resumed
        run.blocks = _blocks(run, inputs, places, packing, trust_remote_code)
        if inputs.chosen:
            terminal.note(f"distill: --loss auto takes {inputs.chosen}")
        if per_step < recipe.documents_per_step(layout.data_ranks):
            terminal.note(f"distill: {_told_small(recipe, per_step, layout)}")
        terminal.note(
            f"distill: {run.steps:,} steps of {per_step} documents, "
            f"{len(documents):,} documents, {layout.plan()} on {accelerator.device.type}"
        )
        with killed_ones_told(), told_of_others():
            return train(run, identity)


def _told_small(recipe: Recipe, per_step: int, layout: Layout) -> str:
    """Say that a step has room for more documents than an epoch has."""
    what = "documents of the data" if recipe.on_policy is None else "completions of all prompts"
    return (
        f"each step takes the {per_step:,} {what}, once: --per-device-train-batch-size x --gradient-accumulation-steps "
        f"x processes is {recipe.documents_per_step(layout.data_ranks):,}"
    )


def _evaluation(
    inputs: Inputs, reporting: Reporting, cut: Cut, trained: nn.Module, packing: int, layout: Layout,
    device: torch.device,
) -> Evaluation | None:  # fmt: skip
    """Return what reads held-out documents, if there are some."""
    from xtk.models.causal_lm import context_length
    from xtk.training.held_out import Evaluation, HeldOut

    asked = inputs.held_out or HeldOut.of_documents(reporting.eval_documents)
    if not len(asked.source):
        return None
    return Evaluation(asked, trained, inputs.tokenizer, context_length(cut.model.config), packing, layout, device)


def _examination(reporting: Reporting, cut: Cut, inputs: Inputs, recipe: Recipe) -> Examination | None:
    """Return what asks the student, if it is asked something."""
    from xtk.training.eval_tasks import Examination

    if not reporting.eval_tasks:
        return None
    return Examination(reporting.eval_tasks, cut, inputs.tokenizer, recipe.mixed_precision)


def _check_teaching(recipe: Recipe, teachers: Sequence[LiveTeacher], layout: Layout, adapted: bool) -> None:
    """Refuse a student that cannot write, or cannot teach itself, as it is asked to.

    Raises:
        XtkError: tells why.
    """
    from xtk.training.student_writer import check_writer

    if recipe.on_policy is not None:
        check_writer(recipe.on_policy, layout)
        recipe.on_policy.check_batch(recipe.documents_per_step(layout.data_ranks))
    if recipe.offload_student and (layout.sharded or not teachers):
        raise XtkError(
            "--offload-student is for a student that each process has all of, beside live teachers",
            hint="--fsdp-offload, for one that is shared out",
        )
    asked = {teacher.weights for teacher in teachers} - {""}
    if asked and layout.sharded:
        raise XtkError(
            f"a student that is cut over processes ({layout}) is not its own teacher",
            hint="--teacher with its folder, for the weights that it begins with; or replicas",
        )
    if "ema" in asked and not recipe.ema_decay:
        raise XtkError("--teacher self:weights=ema, and there is no average", hint="--ema-decay 0.99")
    if "base" in asked and not adapted:
        raise XtkError("--teacher self:weights=base, and the student has no adapter", hint="--lora-r 16")


def _order(recipe: Recipe, documents: np.ndarray, sizes: np.ndarray, per_step: int) -> Order:
    """Return which documents, or prompts, a step takes."""
    if recipe.on_policy is None:
        return Order(documents, sizes, per_step, recipe.seed)
    return RoundOrder(documents, sizes, per_step, recipe.seed, recipe.on_policy)


def _blocks(run: Run, inputs: Inputs, places: Places, packing: int, trust_remote_code: bool) -> Blocks | None:
    """Return the blocks of a run with live teachers, or the rounds of one that is on-policy, and tell of them."""
    on_policy = run.recipe.on_policy
    if on_policy is None:
        return blocks_of(inputs.source, run.order, run.steps, run.recipe.teacher_steps, places.output, run.accelerator)
    from xtk.rollouts.writer import WriterRequest
    from xtk.training.logprob_check import LogprobCheck
    from xtk.training.student_writer import OWN, StudentWriter

    assert isinstance(inputs.source, RoundSource)
    assert isinstance(run.order, RoundOrder)
    options: dict[str, Any] = {"adapter": places.adapter} if places.adapter else {}
    if on_policy.backend == "server":
        options["servers"] = list(on_policy.server)
    elif on_policy.engine:
        options["engine"] = dict(on_policy.engine)
    request = WriterRequest(places.student, str(places.student), inputs.tokenizer, on_policy.dtype,
                            on_policy.batch_tokens, trust_remote_code, options)  # fmt: skip
    writer = StudentWriter(
        on_policy,
        inputs.tokenizer,
        run.cut,
        request,
        lambda folder: run.saver.write_student(folder) if run.saver is not None else None,
        places.output,
        mixed_precision=run.recipe.mixed_precision,
        seed=run.recipe.seed,
    )
    terminal.note(f"distill: {on_policy.plan(writer.plan(run.accelerator.num_processes))}")
    for teacher in inputs.source.teachers:
        terminal.note(f"distill: {teacher.plan()}")
    check = None
    if on_policy.backend != OWN:
        check = LogprobCheck(run.model, run.layout, packing, run.accelerator.device)
    return Rounds(inputs.source, run.order, run.steps, on_policy, places.output, run.accelerator, writer, check)


def _start(places: Places, recipe: Recipe, reporting: Reporting) -> Any:
    """Meet the other processes; return Accelerate's accelerator.

    Raises:
        XtkError: a tracker is not there, Accelerate was told to do what `--parallel` does, or processes are to make
            the batches of live teachers.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from xtk.training.processes import join_after_a_restart
    from xtk.training.trackers import check_trackers

    check_trackers(reporting.report_to)
    if places.teachers and reporting.dataloader_num_workers:
        raise XtkError("batches of live teachers are made by a thread", hint="--dataloader-num-workers 0")
    timeout = timedelta(seconds=reporting.ddp_timeout)
    join_after_a_restart(timeout)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=list(reporting.report_to) or None,
        project_dir=str(places.output / TRACKERS) if reporting.report_to else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise XtkError(
            f"Accelerate was told to share the work by {kind}, and xtk does that itself",
            hint="accelerate launch --multi_gpu -m xtk distill ... --parallel fsdp=N",
        )
    return accelerator


def _load(
    origin: Origin, recipe: Recipe, inputs: Inputs, accelerator: Any, layout: Layout, trust_remote_code: bool
) -> Cut:
    """Load the student, whole, and cut it."""
    import torch

    from xtk.models.causal_lm import Cut
    from xtk.models.preparation import load_student

    model = load_student(
        origin,
        recipe.preparation,
        inputs.tokenizer,
        # Where weights are shared out, each process's part of them goes to its device later.
        device=torch.device("cpu") if layout.sharded else accelerator.device,
        mixed_precision=recipe.mixed_precision,
        trust_remote_code=trust_remote_code,
    )
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Cut(model)


def _merging(places: Places, recipe: Recipe, inputs: Inputs, trust_remote_code: bool) -> Callable[[Path, Path], None]:
    """Return what loads the student anew, with the adapter of a folder, and writes both as one model."""
    import torch

    from xtk.models.preparation import Origin, load_student, save_student

    def merge(adapter: Path, folder: Path) -> None:
        model = load_student(
            Origin(places.student, places.adapter, adapter),
            recipe.preparation,
            inputs.tokenizer,
            device=torch.device("cpu"),
            mixed_precision=recipe.mixed_precision,
            trust_remote_code=trust_remote_code,
            quiet=True,
        )
        save_student(model, folder)

    return merge


def _tell_rewritten(inputs: Inputs, documents: np.ndarray) -> None:
    """Tell what the student's tokenizer or chat template does not read as it is, in documents all over the cache."""
    sample = documents[:: -(-len(documents) // LOOKED_AT) or 1]
    read = [inputs.source.document(int(number)) for number in sample]
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
        documents = [inputs.source.document(number) for number in numbers]
        for number, sequence in zip(numbers, sequences(inputs.tokenizer, documents), strict=True):
            if len(sequence) > limit:
                found.append((len(sequence), number))
    return found


def _prompts(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the prompts that count, and how long each is."""
    assert isinstance(inputs.source, RoundSource)
    documents = [prompt.document for prompt in inputs.source.prompts]
    sizes = np.array([len(document.text.encode()) for document in documents], np.int64)
    counting = np.flatnonzero([document.weight > 0 for document in documents])
    if not len(counting):
        raise XtkError("there is no prompt to go on from")
    return counting, sizes


def _documents(recipe: Recipe, inputs: Inputs, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the documents to train on, and all sizes; those that are too long are counted and told."""
    sizes = inputs.source.text_bytes()
    weightless = inputs.source.weights() == 0
    documents = np.flatnonzero((sizes > 0) & ~weightless)
    if weightless.any():
        terminal.note(f"distill: {weightless.sum():,} of {len(sizes):,} documents have the weight 0 and are left out")
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
