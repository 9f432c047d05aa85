# ruff: noqa: E501
"""Move the package of xtk into folders that are named after the pipeline; deleted with the last move.

    Copy it out of the checkout before it runs: it rewrites names in all files, its own tables too.

    python3 move_house.py [--root CHECKOUT] [--commit] [--dry-run] STEP...

STEP: a folder of the list below (its modules and tests move, and all that names them is rewritten), `structure` (the
layer test with the table of floors and budgets, and its table in docs/explanation/architecture.md), `all` (every
folder, then `structure`), or `check` (prints where each module and each test would go, and what is not in the tables).

Needs git and ruff (--ruff; by default the one of .nox/shared next to the checkout, or on the PATH). Nothing depends on
the contents of files: names are rewritten wherever they stand. Modules that are new since the tables were written get
a folder by rule; they are reported. Run it again after a merge: what has moved already stays.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# --- the tables -----------------------------------------------------------------------------------------------------


def _into(folder: str, source: str, names: str) -> dict[str, str]:
    return {f"{source}.{name}": f"{folder}.{name}" for name in names.split()}


# Old module -> new module, both below xtk. What is not here, in TREES or in a dissolved folder, stays.
MODULES = {
    **_into("files", "artifacts", "atomic_files write_locks output_claims storage_folders fsspec_access "
            "remote_file_cache safe_artifact_files folder_replacement json_validation arrow_validation hub_access"),
    "artifacts.run_folder_names": "files.run_names",
    **_into("data", "artifacts", "arrow_record_readers corpus_reader data_file_readers json_record_reader "
            "record_to_document saved_datasets stdin_buffer text_streams arrow_row_conversion"),
    **_into("text", "tokens", "alignment alignment_numba alignment_statistics different_text_alignment document "
            "document_token_ids model_config_json normalization_changes normalized_byte_offsets rollout_tokens "
            "teacher_tokenization token_sequence tokenizer tokenizer_files tokenizer_formats tokenizer_validation "
            "vocabulary start_tokens"),
    "tokens.chat_template": "text.chat.template",
    "tokens.message_parts": "text.chat.parts",
    "tokens.part_positions": "text.chat.positions",
    "tokens.token_regions": "text.chat.regions",
    **_into("text.chat", "tokens", "conversation_tokens jinja_subprocess region_statistics template_conventions"),
    "artifacts.projection_file": "projection.file",
    "artifacts.projection_disk_cache": "projection.disk_cache",
    "artifacts.corpus_cooccurrence_counts": "projection.corpus_cooccurrence_counts",
    "artifacts.cache_manifest": "cache.manifest",
    "artifacts.cache_merging": "cache.merging",
    "artifacts.cache_output": "cache.output",
    "artifacts.cache_shard": "cache.shard",
    "artifacts.cache_statistics": "cache.statistics",
    "artifacts.cache_writer": "cache.writer",
    "artifacts.shard_columns": "cache.columns",
    "artifacts.shard_writing": "cache.shard_writing",
    "artifacts.teacher_cache": "cache.reader",
    "artifacts.token_ids_by_frequency": "cache.token_ids_by_frequency",
    "tokens.teacher_logprobs": "cache.teacher_logprobs",
    "artifacts.shard_codec_registry": "cache.codec.shard_codec_registry",
    **_into("parallel", "training", "process_group parallel_config distributed_launch graceful_stop"),
    **_into("parallel", "models", "fsdp_and_tensor_parallel host_to_device"),
    "artifacts.model_resolver": "models.resolver",
    **_into("models", "artifacts", "gguf_models weight_hash embedding_weights"),
    "evaluation.token_logprobs": "models.token_logprobs",
    "losses.fused_head_and_loss": "losses.head",
    "losses.loss_interface": "losses.interface",
    "losses.loss_spec": "losses.spec",
    "losses.loss_term": "losses.term",
    **_into("losses.cells", "losses", "loss_cells next_byte_cells shared_vocabulary_cells projected_cells sorted_probs "
            "span_probability_products clipped_surrogate paired_ends"),
    **_into("losses.kernels", "losses", "byte_kl_numba chunked_softmax chunked_softmax_numba chunked_softmax_triton "
            "event_sets_numba largest_tokens longest_prefix_cells_numba prefix_alternatives_numba "
            "projected_cells_numba sampled_support_correction shared_vocabulary_cells_numba sorted_probs_numba "
            "token_boundaries_numba"),
    "artifacts.run_folders": "runs.folder",
    "artifacts.run_folder_removal": "runs.folder_removal",
    **_into("runs", "training", "checkpoint resume_point metrics_file sharded_state trainer_state model_card "
            "rollout_batch_files"),
    **_into("batches", "training", "batch_copies batch_prefetch combine_teachers cross_process_reduction data_sources "
            "losses_per_teacher micro_batches teacher_losses teacher_probability_mixture first_step_comparison"),
    "evaluation.top1_agreement": "batches.top1_agreement",
    "training.student_export": "publish.student_export",
    **_into("api", "library", "alignment cache_from_arrays cache_from_model distillation_batch distillation_collator "
            "distillation_loss packing projections tokenizer_argument"),
    **_into("importers", "library", "byte_tokenizer cache_export cache_import completion_logprobs distillkit_codec "
            "foreign_logprobs"),
    "teachers.service_answers": "importers.service_answers",
    **_into("pages", "commands", "alignment_html alignment_tables completions_html html_page projection_audit_html "
            "projection_audit_tables regions_html report_html svg_curves teacher_cache_html"),
    "commands.terminal_tables": "terminal_tables",
}  # fmt: skip
# Folders that move whole, with everything in them.
TREES = {"artifacts.codec": "cache.codec", "training.runs": "training.kinds"}
# Folders that end, and where a module goes that no rule places.
DISSOLVED = {"artifacts": "files", "tokens": "text", "library": "api"}
# Rules for modules that are not in MODULES: (old folder, pattern of the name, new folder).
RULES = [
    ("losses", r".*_(numba|triton)", "losses.kernels"),
    ("losses", r".*_cells", "losses.cells"),
    ("commands", r".*_html|.*_page|svg_.*|.*_audit_tables", "pages"),
    ("training", r".*export.*|.*gguf.*|upload.*", "publish"),
    ("training", r".*checkpoint.*|.*_state|metrics.*", "runs"),
    ("tokens", r"chat_.*|message_.*|template_.*|.*_template|.*region.*|conversation.*|jinja.*", "text.chat"),
    ("artifacts", r"cache_.*|shard_.*", "cache"),
    ("artifacts", r"arrow_.*|.*_rows?|.*record.*|.*reader.*|data_.*", "data"),
    ("artifacts", r"projection_.*", "projection"),
    ("artifacts", r"run_.*", "runs"),
    ("artifacts", r"gguf_.*|model_.*|weight_.*", "models"),
    ("library", r".*import.*|.*export.*|.*codec.*|foreign.*", "importers"),
]
STEPS = ["evaluate", "base", "files", "text", "data", "projection", "cache", "parallel", "models", "losses", "runs", "batches",
         "training", "publish", "api", "importers", "pages"]  # fmt: skip

# Test modules and their helpers: old path below tests -> new folder.
TESTS = {
    **dict.fromkeys(("artifacts/test_folder_replacement.py", "artifacts/test_locks.py", "artifacts/test_older_versions.py",
                     "artifacts/test_temporary_files.py"), "files"),
    **dict.fromkeys(("artifacts/test_corpus.py", "artifacts/test_data_forms.py", "artifacts/test_records.py",
                     "artifacts/test_table_rows.py"), "data"),
    **dict.fromkeys(("artifacts/test_counting.py", "artifacts/test_projection_cache.py",
                     "artifacts/test_projection_file.py"), "projection"),
    **dict.fromkeys(("artifacts/reference_packed_codec.py", "artifacts/test_flipped_bytes.py",
                     "artifacts/test_logprob_codec.py", "artifacts/test_merging.py", "artifacts/test_remote.py",
                     "artifacts/test_teacher_cache.py"), "cache"),
    **dict.fromkeys(("training/test_process_group.py", "training/test_several_machines.py"), "parallel"),
    **dict.fromkeys(("training/checkpoint_processes.py", "training/test_checkpoints.py", "training/test_resume.py"),
                    "runs"),
    **dict.fromkeys(("training/test_auto_note.py", "training/test_mixture.py", "training/test_teachers.py",
                     "training/test_first_step_comparison.py"), "batches"),
    **dict.fromkeys(("training/test_export.py", "training/test_export_formats.py", "training/test_gguf.py"), "publish"),
    **dict.fromkeys(("library/test_files_of_other_tools.py", "library/test_import_and_export.py",
                     "library/test_mutated_imports.py", "teachers/test_answer_files.py"), "importers"),
    **dict.fromkeys(("commands/test_report_in_a_browser.py",), "pages"),
}  # fmt: skip
# Test folders that end: where a file goes that is not in TESTS, and the step in which it does.
TEST_FOLDERS = {"artifacts": "cache", "tokens": "text", "library": "api"}
# Helpers of tests that other folders find by path.
TEST_PATHS = [
    ("tests/benchmarks/bench_scale.py", 'parent / "artifacts"', 'parent / "cache"', "cache"),
]
TEST_FOLDER_WORDS = {"tests/cache": "tests/cache", "tests/text": "tests/text", "tests/api": "tests/api"}

DOCSTRINGS = {
    "api": "The Python API: the objects of `import xtk`, built of the same parts as the commands.",
    "batches": "From documents to a micro-batch: sources, tokens and cells, several teachers, losses per teacher, sums.",
    "cache": "Teacher caches: folders of Arrow shards with a manifest; see docs/reference/artifacts.md.",
    "cache.codec": "The codecs of shards, which alone know the bits: ids and quantized log-probabilities.",
    "data": "Data: files and records become documents.",
    "files": "Files and folders: atomic writes, locks, claims of outputs, local and remote storage.",
    "importers": "Teacher caches from and for other tools, and answers of services.",
    "losses.cells": "The mechanisms of losses: which events are compared, and how a student's probabilities add up to them.",
    "losses.kernels": "Kernels of losses: numba and Triton, and the chunked softmax that calls them.",
    "pages": "HTML pages: alignment, caches, projections, regions, completions and runs.",
    "parallel": "Processes and devices of a run: groups, layouts, launch, sharding, copies between host and GPU.",
    "publish": "A finished student for the world: model folders, GGUF and the Hugging Face hub.",
    "runs": "Runs on disk: folder, recipe, checkpoints, resuming, metrics and model card.",
    "text": "Text: tokenizers as bytes, vocabularies, documents, and the alignment of two tokenizations.",
    "text.chat": "Conversations: chat templates, the parts of messages, their positions and regions.",
    "training.kinds": "The kinds of runs of `xtk distill`: one module per kind, which opens and checks the inputs of a run.",
}
STALE_DOCSTRINGS = [
    (
        "Training: inputs of `distill`, the training loop (training_loop.py), on-policy rollouts, checkpoints and export.",
        "Training: configuration and start of `distill`, the training loop (training_loop.py), on-policy and held-out runs.",
    ),
]
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".sbatch", ".cfg", ".ini"}
OTHER_FILES = {".ci/run", "Dockerfile", "Makefile"}
UNCHANGED = {"CHANGELOG.md"}  # what was true when it was released

# --- files and git --------------------------------------------------------------------------------------------------


class House:
    """A checkout of xtk."""

    def __init__(self, root: Path, ruff: str, dry: bool) -> None:
        self.root, self.ruff, self.dry = root, ruff, dry

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True).stdout

    def files(self) -> list[Path]:
        """Return the files that git knows or would add."""
        names = self.git("ls-files", "-co", "--exclude-standard", "-z").split("\0")
        return [self.root / name for name in sorted(set(names)) if name and (self.root / name).is_file()]

    def modules(self) -> dict[str, Path]:
        """Return the modules below xtk, by dotted name; packages too."""
        found = {}
        for path in sorted((self.root / "xtk").rglob("*.py")):
            parts = list(path.relative_to(self.root / "xtk").with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            if parts:
                found[".".join(parts)] = path
        return found

    def move(self, old: Path, new: Path) -> None:
        new.parent.mkdir(parents=True, exist_ok=True)
        if new.exists():
            raise SystemExit(f"{new.relative_to(self.root)} exists already; {old.relative_to(self.root)} stays")
        self.git("mv", str(old), str(new))


def place_of(name: str, path: Path) -> tuple[str, bool]:
    """Return the new dotted name of a module, and whether a table (not a rule) states it."""
    if name in MODULES:
        return MODULES[name], True
    for old, new in TREES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :], True
    package, _, leaf = name.rpartition(".")
    if path.name == "__init__.py":
        return name, True  # empty ones of dissolved folders are removed
    for old, pattern, folder in RULES:
        if package == old and re.fullmatch(pattern, leaf):
            return f"{folder}.{leaf}", False
    top, _, rest = name.partition(".")
    if top in DISSOLVED and rest:
        return f"{DISSOLVED[top]}.{rest}", False
    return name, True


def step_of(new: str) -> str:
    return new.partition(".")[0] if "." in new else "base"


def places(house: House) -> tuple[dict[str, str], list[str]]:
    """Return {old module: new module} of those that move, and those that a rule placed."""
    moves, by_rule = {}, []
    for name, path in house.modules().items():
        new, known = place_of(name, path)
        if new != name:
            moves[name] = new
            if not known:
                by_rule.append(name)
    return moves, by_rule


def test_places(house: House) -> tuple[dict[str, str], list[str]]:
    """Return {old path: new path} below tests, and those that are in no table."""
    moves, by_rule = {}, []
    for path in sorted((house.root / "tests").rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        old = path.relative_to(house.root / "tests")
        name = str(old)
        if name in TESTS:
            moves[name] = f"{TESTS[name]}/{old.name}"
        elif old.parts[0] in TEST_FOLDERS:
            moves[name] = str(Path(TEST_FOLDERS[old.parts[0]], *old.parts[1:]))
            if old.parts[0] == "artifacts":
                by_rule.append(name)
    return moves, by_rule


# --- rewriting ------------------------------------------------------------------------------------------------------


def rewrite_imports_of_modules(text: str, moved: dict[str, str]) -> str:
    """Rewrite `from xtk.a import b`, where b is a module that moves."""
    lines = text.splitlines(keepends=True)
    edits = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] != "xtk":
            continue
        package = node.module.removeprefix("xtk").removeprefix(".")
        full = {alias.name: f"{package}.{alias.name}".lstrip(".") for alias in node.names}
        if not any(name in moved for name in full.values()):
            continue
        groups: dict[str, list[str]] = defaultdict(list)
        for alias in node.names:
            folder, leaf = package, alias.name
            if full[alias.name] in moved:
                folder, _, leaf = moved[full[alias.name]].rpartition(".")
            known_as = alias.asname or (alias.name if leaf != alias.name else None)
            groups[".".join(filter(None, ("xtk", folder)))].append(f"{leaf} as {known_as}" if known_as else leaf)
        indent = " " * node.col_offset
        new = f"\n{indent}".join(f"from {module} import {', '.join(names)}" for module, names in groups.items())
        edits.append((node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0, new))
    for first, last, start, end, new in sorted(edits, reverse=True):
        before = lines[first - 1].encode()[:start].decode()
        after = lines[last - 1].encode()[end:].decode()
        lines[first - 1 : last] = [before + new + after]
    return "".join(lines)


def rewrite_imports_in_strings(text: str, moved: dict[str, str]) -> str:
    """Rewrite `from xtk.a import b` in code that is a string, or in a page, where b is a module that moves."""

    def statement(match: re.Match[str]) -> str:
        package = match[1].lstrip(".")
        groups: dict[str, list[str]] = defaultdict(list)
        for item in match[2].split(","):
            name, _, known_as = item.strip().partition(" as ")
            folder, leaf = package, name
            if (full := f"{package}.{name}".lstrip(".")) in moved:
                folder, _, leaf = moved[full].rpartition(".")
            shown = known_as or (name if leaf != name else "")
            groups[".".join(filter(None, ("xtk", folder)))].append(f"{leaf} as {shown}" if shown else leaf)
        if list(groups) == [".".join(filter(None, ("xtk", package)))]:
            return match[0]
        return "; ".join(f"from {module} import {', '.join(names)}" for module, names in groups.items())

    name = r"[A-Za-z_]\w*(?: as \w+)?"
    return re.sub(rf"\bfrom xtk((?:\.\w+)*) import ({name}(?:, {name})*)", statement, text)


class Rewriter:
    """Rewrites the names of moved modules, files and folders in any text."""

    def __init__(
        self, moved: dict[str, str], trees: dict[str, str], tests: dict[str, str], words: dict[str, str]
    ) -> None:
        self.moved, self.trees, self.tests, self.words = moved, trees, tests, words
        # Names of files that are unique and change: they may stand in a page without their folder.
        leaves = defaultdict(list)
        for old in moved:
            leaves[old.rpartition(".")[2]].append(old)
        self.renamed = {
            leaf: olds[0] for leaf, olds in leaves.items()
            if len(olds) == 1 and moved[olds[0]].rpartition(".")[2] != leaf
        }  # fmt: skip

    def dotted(self, name: str) -> str | None:
        """Return the new form of a dotted name below xtk that begins with a moved module or folder."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            head = ".".join(parts[:count])
            new = self.moved.get(head) or self.trees.get(head)
            if new:
                return ".".join([new, *parts[count:]])
        return None

    def path(self, path: str) -> str | None:
        new = self.moved.get(path.replace("/", ".")) or self.trees.get(path.replace("/", "."))
        return new.replace(".", "/") if new else None

    def text(self, text: str, *, prose: bool) -> str:
        def dotted(match: re.Match[str]) -> str:
            new = self.dotted(match[1])
            return f"xtk.{new}" if new else match[0]

        def listed(match: re.Match[str]) -> str:
            """A list of files after the folder of the first: `xtk/a/b.py, c.py`."""
            folder = match[2].rpartition("/")[0]
            new_folder = (self.path(match[2]) or match[2]).rpartition("/")[0]

            def item(one: re.Match[str]) -> str:
                new = self.path(f"{folder}/{one[1]}") or f"{folder}/{one[1]}"
                here, _, leaf = new.rpartition("/")
                return f"{leaf}.py" if here == new_folder else f"{match[1]}{new}.py"

            rest = re.sub(r"\b(\w+)\.py\b", item, match[3]) if folder else match[3]
            return f"{match[1]}{self.path(match[2]) or match[2]}.py{rest}"

        def whole(match: re.Match[str]) -> str:
            new = self.path(match[2])
            return f"{match[1]}{new}{match[3] or ''}" if new else match[0]

        def bare(match: re.Match[str]) -> str:
            old = self.renamed.get(match[1])
            return self.moved[old].replace(".", "/") + ".py" if old else match[0]

        def test(match: re.Match[str]) -> str:
            new = self.tests.get(match[1] + ".py")
            return f"tests/{new.removesuffix('.py')}" if new else self.words.get(match[0], match[0])

        text = re.sub(r"\bxtk\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", dotted, text)
        more = r"((?:(?:`?, | and |`? and |, and )`?\w+\.py\b)+)"
        text = re.sub(rf"(?<![\w/.-])(xtk/|)((?:\w+/)+\w+)\.py\b{more}", listed, text)
        text = re.sub(r"(?<![\w/.-])(xtk/)((?:\w+/)*\w+)(\.py\b)?", whole, text)
        text = re.sub(r"(?<![\w/.-])()((?:\w+/)+\w+)(\.py\b)", whole, text)
        if prose:
            text = re.sub(
                r"(?<![\w/.-])()((?:\w+/)+\w+)(/)?(?=[`,\s])",
                lambda m: whole(m) if m[2].replace("/", ".") in self.trees else m[0],
                text,
            )
            text = re.sub(r"(?<![\w/.-])(\w+)\.py\b", bare, text)
        return re.sub(r"(?<![\w.-])tests/((?:\w+/)*\w+)", test, text)


# --- the steps ------------------------------------------------------------------------------------------------------


def run_step(house: House, step: str) -> bool:
    """Move the modules and tests of a folder; return whether something moved."""
    all_moves, _ = places(house)
    moved = {old: new for old, new in all_moves.items() if step_of(new) == step}
    all_tests, _ = test_places(house)
    tests = {old: new for old, new in all_tests.items() if new.partition("/")[0] == step}
    if house.dry or not (moved or tests):
        for old, new in {**moved, **tests}.items():
            print(f"  {old} -> {new}")
        return False
    modules = house.modules()
    trees = {old: new for old, new in TREES.items() if step_of(new) == step}
    for old, new in sorted(moved.items()):
        path = modules[old]
        target = house.root / "xtk" / new.replace(".", "/")
        house.move(path, target / "__init__.py" if path.name == "__init__.py" else target.with_suffix(".py"))
    for old, new in sorted(tests.items()):
        house.move(house.root / "tests" / old, house.root / "tests" / new)
    words = {old: new for old, new in TEST_FOLDER_WORDS.items() if new == f"tests/{step}"}
    rewriter = Rewriter(moved, trees, tests, words)
    changed = []
    for path in house.files():
        name = str(path.relative_to(house.root))
        if (path.suffix not in SUFFIXES and name not in OTHER_FILES) or name in UNCHANGED:
            continue
        before = path.read_text(encoding="utf-8")
        after = before
        if path.suffix == ".py":
            after = rewrite_imports_of_modules(after, {**moved, **trees})
            for old, new in tests.items():  # a helper that is imported with its folder
                old, new = (str(Path(one).with_suffix("")).replace("/", ".") for one in (old, new))
                after = re.sub(rf"\b(from|import) {re.escape(old)}\b", rf"\1 {new}", after)
        after = rewrite_imports_in_strings(after, {**moved, **trees})
        after = rewriter.text(after, prose=True)
        for file, old, new, of in TEST_PATHS:
            if name == file and step == of:
                after = after.replace(old, new)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    make_packages(house)
    remove_empty_folders(house)
    tidy(house, changed)
    print(f"{step}: {len(moved)} modules, {len(tests)} files of tests")
    return True


def make_packages(house: House) -> None:
    """Add an __init__.py to each folder of modules that has none."""
    for folder in sorted({path.parent for path in (house.root / "xtk").rglob("*.py")}):
        file = folder / "__init__.py"
        if not file.exists():
            name = ".".join(folder.relative_to(house.root / "xtk").parts)
            file.write_text(f'"""{DOCSTRINGS[name]}"""\n', encoding="utf-8")
            house.git("add", str(file))


def remove_empty_folders(house: House) -> None:
    """Remove folders without modules, and compiled leftovers."""
    for top in ("xtk", "tests"):
        folders = sorted((path for path in (house.root / top).rglob("*") if path.is_dir()), reverse=True)
        for folder in folders:
            if folder.name == "__pycache__" or not folder.exists():
                continue
            left = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
            ends = folder.name in DISSOLVED and folder.parent == house.root / "xtk"
            if ends and [path.name for path in left] == ["__init__.py"]:
                house.git("rm", "-qf", str(left[0]))
                left = []
            if not left:
                shutil.rmtree(folder, ignore_errors=True)


def tidy(house: House, changed: list[Path]) -> None:
    """Sort imports and format what changed, as `nox -s lint` demands; examples are not formatted."""
    names = [path.relative_to(house.root) for path in changed if path.suffix == ".py" and path.exists()]
    targets = [str(name) for name in names if name.parts[0] in ("xtk", "tests", "docs", "noxfile.py")]
    if not targets:
        return
    for command in (["check", "--quiet", "--fix", "--select", "I"], ["format", "--quiet"]):
        subprocess.run([house.ruff, *command, *targets], cwd=house.root, check=True)


EVALUATE_NAMES = {"BITS_MODE", "REWARD_MODE", "TASKS_MODE", "OPTIONS_BY_MODE", "EvaluateOptions"}


def split_evaluate(house: House) -> bool:
    """Give the options of `xtk evaluate` a separate file, which ends the last circle of imports."""
    commands = house.root / "xtk" / "commands"
    source, target = commands / "evaluate.py", commands / "evaluate_options.py"
    if target.exists() or house.dry:
        return False
    text = source.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    imports, own, edits = [], [], []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append("".join(lines[node.lineno - 1 : node.end_lineno]))
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        names = {getattr(node, "name", "")} if isinstance(node, ast.ClassDef) else names
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.ClassDef) and names & EVALUATE_NAMES:
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            while lines[first - 2].startswith("#"):
                first -= 1
            own.append(("\n\n" if isinstance(node, ast.ClassDef) else "") + "".join(lines[first - 1 : node.end_lineno]))
            edits.append((first, node.end_lineno))
    for first, last in reversed(edits):
        del lines[first - 1 : last]
    text = "".join(lines)
    names = ", ".join(sorted(EVALUATE_NAMES))
    text = text.replace(imports[-1], f"{imports[-1]}from xtk.commands.evaluate_options import {names}\n", 1)
    source.write_text(text, encoding="utf-8")
    head = '"""Options of `xtk evaluate`, by heading of its help, and the modes that read them."""\n\n'
    target.write_text(head + "".join(imports) + "\n" + "".join(own), encoding="utf-8")
    house.git("add", str(target))
    changed = [source, target]
    for path in house.files():
        if path.suffix == ".py" and path not in (source, target):
            before = path.read_text(encoding="utf-8")
            after = before.replace("from xtk.commands.evaluate import EvaluateOptions\n",
                                   "from xtk.commands.evaluate_options import EvaluateOptions\n")  # fmt: skip
            if after != before:
                path.write_text(after, encoding="utf-8")
                changed.append(path)
    page = house.root / "docs" / "contributing.md"
    before = page.read_text(encoding="utf-8")
    page.write_text(before.replace("for `distill` in `distill_options.py`", "for `distill` and `evaluate` in `NAME_options.py`"),
                    encoding="utf-8")  # fmt: skip
    for path in (source, target):
        subprocess.run(
            [house.ruff, "check", "--quiet", "--fix", "--select", "F401", str(path)], cwd=house.root, check=True
        )
    tidy(house, changed)
    print("evaluate: the options are in commands/evaluate_options.py")
    return True


def commit(house: House, step: str) -> None:
    house.git("add", "-A")
    title, text = MESSAGES.get(step, (f"{step}/: its modules and tests in one folder", ""))
    body = text or (
        "Files move and imports follow, by script; no statement changes. Why: the folders are the nouns of the pipeline, "
        "read from left to right (docs/explanation/architecture.md)."
    )
    house.git("commit", "-q", "-m", title, "-m", body)


MESSAGES = {
    "evaluate": (
        "evaluate: the options in a file of their own, so that no modules import each other in a circle",
        "evaluate imported evaluate_bits_per_byte, evaluate_tasks and load_models inside of functions, and these imported "
        "EvaluateOptions from evaluate for its type. Options and modes are now in commands/evaluate_options.py, as those "
        "of distill are in distill_options.py. No behavior changes.",
    ),
    "base": ("xtk: tables on the terminal beside terminal.py", ""),
    "text": ("text/: tokenizers, documents and alignment; conversations in text/chat/", ""),
    "cache": ("cache/: shards, reader, writer and manifest of teacher caches; the bits in cache/codec/", ""),
    "losses": ("losses/: mechanisms in losses/cells/, kernels in losses/kernels/", ""),
    "training": ("training/kinds/: the four kinds of runs", ""),
    "structure": (
        "layer test: one table of floors and budgets, and no circles",
        "Imports of modules go to lower folders only, imports inside of functions included; no modules import each "
        "other in a circle; each folder has a budget of lines and at most 40 files. architecture.md prints the table.",
    ),
}


# --- the last step: floors, budgets, the page -----------------------------------------------------------------------

# From the lowest floor up: folder ("*.py": the modules of xtk itself that are not listed), contents, budget.
# Where one budget is for several folders, it is divided among them.
FLOORS = [
    ("*.py", "errors, printing, child processes, compilation of kernels, cache folders, code of users", 950),
    ("options", "declaration and parsing of options", 900),
    ("files", "atomic writes, locks, claims of outputs, local and remote storage", 1500),
    ("text", "tokenizers as bytes, vocabularies, documents, alignment; `chat/`: templates, parts, positions, regions",
     6000),
    ("data", "files and records become documents", 1800),
    ("projection", "the sparse matrix between two vocabularies, its methods, audit, file and disk cache", 2600),
    ("cache", "teacher caches: shards, reader, writer, manifest, statistics; `codec/` alone knows the bits", 5600),
    ("engines", "worker processes, HTTP clients and vLLM settings that teachers and generation share", 850),
    ("parallel", "process groups, layouts, launch, sharding, copies between host and GPU", 700),
    ("models", "loading, backbone and output head, packed attention, fingerprints, GGUF", 2600),
    ("losses", "one file a loss, and the fused head; `cells/`: the mechanisms; `kernels/`: numba and Triton", 5800),
    ("teachers", "backends, planning and writing of caches, online teachers", 3000),
    ("rewards", "rewards, and the sandbox that runs generated code", 2100),
    ("rollouts", "generation backends, prompts, environments, files of rollouts", 2500),
    ("runs", "runs on disk: folder, recipe, checkpoints, resuming, metrics, model card", 1900),
    ("batches", "documents become micro-batches: sources, several teachers, losses per teacher, reduction", 2300),
    ("evaluation", "bits per byte, answers scored by rewards, lm-evaluation-harness", 1900),
    ("training", "`distill`: configuration, loop, step, on-policy, held-out; `kinds/`: the four kinds of runs", 3900),
    ("publish", "a finished student as a model folder, GGUF file or repository of the hub", 450),
    ("transplant", "another tokenizer for a model: rows of embedding and head, pruned vocabularies", 1100),
    ("api", "the Python API: `xtk/__init__.py` names its objects", 1500),
    ("importers", "caches from and for other tools, answers of services", 1550),
    ("doctor", "checks and forecasts before a long run", 1250),
    ("quickstart", "the demonstration pipeline and its tiny models", 450),
    ("pages", "HTML pages and the tables on them", 900),
    ("commands", "one module per command, with its options: checks of inputs, printed results", 4300),
    ("cli.py", "the list of commands; exit codes and error messages", 200),
    ("integrations", "distillation in the trainers of other libraries", 300),
    ("__main__.py", "the entry point: streams, cache folders, signals", 100),
]  # fmt: skip

TABLE_COMMENT = """# From the lowest floor up: a module imports from its own folder and from those above it in this list, also inside of
# functions. Folder ("*.py": the modules of xtk that are not listed), contents, lines at most; raising them is a commit
# that states why. docs/explanation/architecture.md prints this table.
"""

IMPORTED_MODULES = '''
def imported_modules(path: Path) -> set[str]:
    """Return the modules of xtk that a file imports, in functions and for types too; not xtk itself."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.startswith("xtk.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xtk":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in MODULES else str(node.module) for name in names}
    return imported - {"xtk"}
'''

NEW_NAMES = """
def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
"""

PART_OF = '''
def part_of(path: Path) -> str:
    """Return the entry of FLOORS of a file."""
    part = path.relative_to(PACKAGE).parts[0]
    return "*.py" if part.endswith(".py") and part not in FLOOR_OF else part
'''

IMPORT_TEST = """
def test_imports_only_go_to_lower_floors():
    upward = []
    for name, path in MODULES.items():
        for imported in imported_modules(path) if name != "xtk" else ():
            part, other = part_of(path), part_of(MODULES[imported])
            if FLOOR_OF[other] > FLOOR_OF[part]:
                upward.append(f"{name} imports {imported}")
    assert upward == []
"""

MORE_TESTS = """
def test_no_modules_import_each_other_in_a_circle():
    left = {name: imported_modules(path) - {name} for name, path in MODULES.items() if name != "xtk"}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    while free := left.keys() - set().union(*left.values()):  # these only import a circle
        for name in free:
            del left[name]
    assert sorted(left) == []


def test_folders_keep_their_budgets():
    lines = dict.fromkeys(FLOOR_OF, 0)
    for path in MODULES.values():
        lines[part_of(path)] += path.read_text(encoding="utf-8").count("\\n")
    budgets = {part: budget for part, _, budget in FLOORS}
    assert {part: count for part, count in lines.items() if count > budgets[part]} == {}
    folders = {path.parent for path in MODULES.values()}
    assert [folder.name for folder in folders if len(list(folder.glob("*.py"))) > 40] == []
    assert [part for part, count in lines.items() if not count] == [], "these entries of FLOORS are empty"
"""


def replace_nodes(text: str, changes: dict[str, str]) -> str:
    """Replace assignments and functions at the top level of a module by name; "" removes one."""
    lines = text.splitlines(keepends=True)
    left = dict(changes)
    for node in reversed(ast.parse(text).body):
        name = getattr(node, "name", "")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else ""
        if name in left:
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            while lines[first - 2].startswith("#"):
                first -= 1
            lines[first - 1 : node.end_lineno] = [left.pop(name)]
    if left:
        print(f"  tests/test_package_structure.py has no {', '.join(left)} (any more): look at it")
    return "".join(lines)


def budget_rows(house: House) -> str:
    """Return the table of floors, with today's lines where a folder is above its budget."""
    listed = {folder for folder, _, _ in FLOORS}
    counts: dict[str, int] = defaultdict(int)
    for path in (house.root / "xtk").rglob("*.py"):
        part = path.relative_to(house.root / "xtk").parts[0]
        counts["*.py" if part.endswith(".py") and part not in listed else part] += path.read_text().count("\n")
    for part in counts:
        if part not in listed:
            raise SystemExit(f"xtk/{part} is in no floor: add it to FLOORS")
    rows = []
    for folder, contents, budget in FLOORS:
        count = counts[folder]
        allowed, comment = (budget, "") if count <= budget else (-(-count // 50) * 50, f"  # to reach: {budget:,}")
        row = f'    ("{folder}", "{contents}", {allowed:_}),{comment}'
        if len(row) > 120:
            row = f'    ("{folder}",\n     "{contents}",\n     {allowed:_}),{comment}'
        rows.append(row)
    return TABLE_COMMENT + "FLOORS = [\n" + "\n".join(rows) + "\n]  # fmt: skip\n"


def structure(house: House) -> None:
    """Write the layer test with its table, and the page that prints it."""
    path = house.root / "tests" / "test_package_structure.py"
    text = path.read_text(encoding="utf-8")
    table = budget_rows(house)
    if "\nFLOORS = [" in text:
        text = replace_nodes(text, {"FLOORS": table})
    else:
        floor_of = "FLOOR_OF = {part: floor for floor, (part, _, _) in enumerate(FLOORS)}\n"
        text = replace_nodes(text, {
            "LAYERS": table, "ALLOWED_WITHIN_LAYER": floor_of, "imported_parts": NEW_NAMES + "\n" + IMPORTED_MODULES,
            "part_of": PART_OF, "test_imports_only_go_to_lower_layers": IMPORT_TEST.lstrip("\n") + "\n" + MORE_TESTS,
        })  # fmt: skip
        text = text.replace("layers, lazy imports", "floors, budgets, lazy imports")
    text = text.replace('if part_of(path) == "commands":', 'if part_of(path) in ("commands", "pages"):')
    text = text.replace("module_level_except_in_commands", "module_level_except_in_commands_and_pages")
    text = text.replace(
        "Commands import inside of functions, for a fast", "Commands and pages import inside of functions, for a fast"
    )
    path.write_text(text, encoding="utf-8")
    subprocess.run([house.ruff, "check", "--quiet", "--fix", "--select", "F401", str(path)], cwd=house.root, check=True)
    page_with_table(house)
    generate = house.root / "docs" / "generate.py"
    code = generate.read_text(encoding="utf-8")
    if "floors_table" not in code:
        generate.write_text(generator_with_table(code), encoding="utf-8")
    for file in (house.root / "xtk").rglob("__init__.py"):
        before = file.read_text(encoding="utf-8")
        after = re.sub(r" Layer \d of the imports\.", "", before)
        for old, new in STALE_DOCSTRINGS:
            after = after.replace(old, new)
        after = re.sub(r'^"""Floor \d: (.)', lambda match: f'"""{match[1].upper()}', after)
        if after != before:
            file.write_text(after, encoding="utf-8")
    tidy(house, [path, generate])
    print("structure: tests/test_package_structure.py, docs/explanation/architecture.md, docs/generate.py")


MARKS = ("<!-- floors: python docs/generate.py -->", "<!-- end of floors -->")
PAGE_TEXT = """Imports go down only, imports inside of functions included, and no modules import each other in a circle: a part imports from
the parts above it in this table. Each part has a budget of lines; raising one is a commit that states why. The table is in
`tests/test_package_structure.py`, which checks all of it.
"""


def page_with_table(house: House) -> None:
    page = house.root / "docs" / "explanation" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    if MARKS[0] not in text:
        start, end = text.find("## The parts"), text.find("`xtk --help` imports neither")
        if start < 0 or end < start:
            raise SystemExit("docs/explanation/architecture.md: the section `The parts` is not as expected")
        text = f"{text[:start]}## The parts\n\n{PAGE_TEXT}\n{MARKS[0]}\n{MARKS[1]}\n\n{text[end:]}"
    text = text.replace(
        "so modules of `commands` import heavy modules", "so modules of `commands` and `pages` import heavy modules"
    )
    table = floors_table([(folder, contents, lines) for folder, contents, lines in current_floors(house)])
    head, rest = text.split(MARKS[0])
    page.write_text(f"{head}{MARKS[0]}\n{table}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")


def current_floors(house: House) -> list[tuple[str, str, int]]:
    tree = ast.parse((house.root / "tests" / "test_package_structure.py").read_text(encoding="utf-8"))
    return next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                and getattr(node.targets[0], "id", "") == "FLOORS")  # fmt: skip


def floors_table(rows: list[tuple[str, str, int]]) -> str:
    lines = [f"| `{folder}` | {contents} | {count:,} |" for folder, contents, count in rows]
    return "\n".join(["| part | contents | lines at most |", "| --- | --- | --- |", *lines])


GENERATOR = '''
def floors_table() -> str:
    """Return the parts of the package, from the table of the layer test."""
    tree = ast.parse((REFERENCE.parent.parent / "tests" / "test_package_structure.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"]
    rows = ast.literal_eval(assigned[0].value)
    lines = [f"| `{folder}` | {contents} | {count:,} |" for folder, contents, count in rows]
    return "\\n".join(["| part | contents | lines at most |", "| --- | --- | --- |", *lines])


def architecture() -> str:
    """Return docs/explanation/architecture.md with the table of the parts."""
    text = (REFERENCE / ARCHITECTURE).read_text(encoding="utf-8")
    head, rest = text.split(FLOORS_BEGIN)
    return f"{head}{FLOORS_BEGIN}\\n{floors_table()}\\n{FLOORS_END}{rest.split(FLOORS_END)[1]}"

'''


def generator_with_table(code: str) -> str:
    """Return docs/generate.py with a page more: architecture.md."""
    for old, new in (
        ("import dataclasses\n", "import ast\nimport dataclasses\n"),
        ('REFERENCE = Path(__file__).parent / "reference"\n',
         'REFERENCE = Path(__file__).parent / "reference"\nARCHITECTURE = "../explanation/architecture.md"\n'
         f'FLOORS_BEGIN, FLOORS_END = "{MARKS[0]}", "{MARKS[1]}"\n'),
        ("\ndef _options(name: str)", GENERATOR + "\ndef _options(name: str)"),
        ('    (REFERENCE / "commands").mkdir(exist_ok=True)\n',
         '    pages[ARCHITECTURE] = architecture()\n    (REFERENCE / "commands").mkdir(exist_ok=True)\n'),
    ):  # fmt: skip
        if code.count(old) != 1:
            print(f"  docs/generate.py: {old.strip()!r} is not there once; add the page architecture.md by hand")
            return code
        code = code.replace(old, new)
    return re.sub(r'^"""Write docs/reference/commands/, losses\.md, rewards\.md and python\.md from the code;',
                  '"""Write docs/reference/ and the parts in architecture.md from the code;', code)  # fmt: skip


# --- reports --------------------------------------------------------------------------------------------------------


def check(house: House) -> None:
    """Print what would move and what the tables do not know."""
    moves, by_rule = places(house)
    tests, tests_by_rule = test_places(house)
    for step in STEPS:
        own = [f"{old} -> {new}" for old, new in moves.items() if step_of(new) == step]
        own += [f"tests/{old} -> tests/{new}" for old, new in tests.items() if new.partition("/")[0] == step]
        print(f"{step}/ ({len(own)})", *own, sep="\n  ")
    for name in by_rule:
        print(f"NOT IN THE TABLE, by rule: {name} -> {moves[name]}")
    for name in tests_by_rule:
        print(f"NOT IN THE TABLE, by rule: tests/{name} -> tests/{tests[name]}")
    for line in upward_imports(house):
        print(f"IMPORT THAT WOULD POINT UP: {line}")
    present = house.modules()
    gone = [old for old, new in MODULES.items() if old not in present and new not in present]
    print("in the table, but neither there nor moved:", ", ".join(gone) or "none")


def upward_imports(house: House) -> list[str]:
    """Return the imports that would point up after the moves: give the module another place, or cut the import."""
    modules = house.modules()
    floor = {folder.removesuffix(".py"): number for number, (folder, _, _) in enumerate(FLOORS)}

    def part(name: str) -> str:
        top = place_of(name, modules[name])[0].partition(".")[0]
        return top if top in floor else "*"

    floor["*"] = 0
    found = []
    for name, path in modules.items():
        if path.name == "__init__.py" and name in DISSOLVED:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "xtk":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for full in names:
                short = full.removeprefix("xtk.")
                other = short if short in modules else short.rpartition(".")[0]
                if full.startswith("xtk.") and other in modules and floor[part(other)] > floor[part(name)]:
                    found.append(f"{name} ({part(name)}) imports {other} ({part(other)})")
    return sorted(set(found))


def leftovers(house: House) -> list[str]:
    """Return lines that still name an old module, file or folder."""
    found = []
    old = "|".join(sorted((re.escape(name) for name in [*MODULES, *TREES]), key=len, reverse=True))
    pattern = re.compile(rf"\bxtk\.(?:{old})\b|\bxtk\.(?:{'|'.join(DISSOLVED)})\b|"
                         rf"(?<![\w/.-])(?:xtk/|tests/)?(?:{'|'.join(DISSOLVED)})/\w+\.py|"
                         rf"(?:xtk|tests)/(?:{'|'.join(DISSOLVED)})\b")  # fmt: skip
    for path in house.files():
        name = str(path.relative_to(house.root))
        if (path.suffix in SUFFIXES or name in OTHER_FILES) and name not in UNCHANGED:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{name}:{number}: {line.strip()[:150]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=[*STEPS, "structure", "all", "check", "leftovers"])
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--ruff", default="")
    parser.add_argument("--commit", action="store_true", help="commit each step")
    parser.add_argument("--dry-run", action="store_true")
    wanted = parser.parse_args()
    root = wanted.root.resolve()
    ruff = wanted.ruff or next(
        (str(path) for path in (root / ".nox/shared/bin/ruff",) if path.exists()),
        "ruff",
    )
    house = House(root, ruff, wanted.dry_run)
    steps = [*STEPS, "structure"] if "all" in wanted.steps else wanted.steps
    if "check" in steps:
        check(house)
        return 0
    if "leftovers" not in steps and wanted.commit and house.git("status", "--porcelain").strip():
        raise SystemExit("--commit needs a clean checkout")
    _, by_rule = places(house)
    _, tests_by_rule = test_places(house)
    for name in [*by_rule, *(f"tests/{name}" for name in tests_by_rule)]:
        print(f"not in the table, placed by rule (see `check`): {name}")
    for step in steps:
        if step == "structure":
            structure(house)
        elif step == "evaluate":
            split_evaluate(house)
        elif step != "leftovers" and not run_step(house, step):
            continue
        if wanted.commit and step != "leftovers" and house.git("status", "--porcelain").strip():
            commit(house, step)
    if "all" in wanted.steps or "leftovers" in steps:
        for line in leftovers(house):
            print(f"still names an old place: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
