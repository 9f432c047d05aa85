"""The structure of the package: floors, budgets, lazy imports, a fast --help, short functions, forbidden calls."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "xtk"

# From the lowest floor up: a module imports from its own folder and from those above it in this list, also inside of
# functions. Folder ("*.py": the modules of xtk that are not listed), contents, lines at most; raising them is a commit
# that states why. docs/explanation/architecture.md prints this table.
FLOORS = [
    ("*.py",
     "errors, printing, progress, child processes, compilation of kernels, cache folders, code of users",
     1_210),  # to reach: 950
    ("options", "declaration and parsing of options", 770),
    ("files", "atomic writes, outputs of commands and their locks, local and remote storage", 1_360),
    ("text",
     "tokenizers as bytes, vocabularies, documents, alignment; `chat/`: templates, parts, positions, regions",
     5_570),
    ("data", "files and records become documents", 1_390),
    ("projection",
     "the sparse matrix between two vocabularies, its methods, audit, file and disk cache",
     2_190),
    ("cache",
     "teacher caches: shards, reader, writer, manifest, statistics; `codec/` alone knows the bits",
     4_980),
    ("parallel", "process groups, layouts, launch, sharding, copies between host and GPU", 700),
    ("models", "loading, backbone and output head, packed attention, fingerprints, GGUF", 2_790),  # to reach: 2,600
    ("engines",
     "worker processes, HTTP clients and vLLM settings that teachers and generation share",
     1_140),  # to reach: 850
    ("losses",
     "one file a loss, and the fused head; `cells/`: the mechanisms; `kernels/`: numba and Triton",
     6_230),  # to reach: 5,800
    ("teachers", "backends, planning and writing of caches, online teachers", 3_020),  # to reach: 3,000
    ("rewards", "rewards, and the sandbox that runs generated code", 1_880),
    ("rollouts", "generation backends, prompts, environments, files of rollouts", 2_250),
    ("runs", "runs on disk: folder, recipe, checkpoints, resuming, metrics, model card", 1_750),
    ("batches",
     "documents become micro-batches: sources, several teachers, losses per teacher, reduction",
     2_300),
    ("evaluation",
     "bits per byte, answers scored by rewards, lm-evaluation-harness, draft models",
     2_060),
    ("training",
     "`distill`: configuration, loop, step, on-policy, held-out; `kinds/`: the four kinds of runs",
     3_980),
    ("publish", "a finished student as a model folder or repository of the hub", 320),
    ("transplant",
     "another tokenizer for a model: rows of embedding and head, pruned vocabularies",
     1_010),
    ("api", "the Python API: `xtk/__init__.py` names its objects", 1_550),
    ("importers", "caches from and for other tools, answers of services", 1_590),  # to reach: 1,550
    ("doctor", "checks and forecasts before a long run", 1_260),
    ("quickstart", "the demonstration pipeline and its tiny models", 700),
    ("pages", "HTML pages, their templates, and the tables on them", 960),  # to reach: 900
    ("commands",
     "one module per command, with its options: checks of inputs, printed results",
     5_290),  # to reach: 4,300
    ("cli.py", "the list of commands; exit codes and error messages", 240),
    ("integrations", "distillation in the trainers of other libraries", 190),
    ("__main__.py", "the entry point: streams, cache folders, signals", 100),
]  # fmt: skip
FLOOR_OF = {part: floor for floor, (part, _, _) in enumerate(FLOORS)}
HEAVY = {"torch", "transformers", "pyarrow", "numba", "accelerate", "datasets", "numpy", "safetensors", "matplotlib"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


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


def part_of(path: Path) -> str:
    """Return the entry of FLOORS of a file."""
    part = path.relative_to(PACKAGE).parts[0]
    return "*.py" if part.endswith(".py") and part not in FLOOR_OF else part


def test_imports_only_go_to_lower_floors():
    upward = []
    for name, path in MODULES.items():
        for imported in imported_modules(path) if name != "xtk" else ():
            part, other = part_of(path), part_of(MODULES[imported])
            if FLOOR_OF[other] > FLOOR_OF[part]:
                upward.append(f"{name} imports {imported}")
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    left = {name: imported_modules(path) - {name} for name, path in MODULES.items() if name != "xtk"}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    while free := left.keys() - set().union(*left.values()):  # these only import a circle
        for name in free:
            del left[name]
    assert sorted(left) == []


def test_few_names_are_vague():
    vague = {"found", "one", "wrong"}  # "one, other" is good for a pair
    scopes = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.Lambda,
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
        ast.GeneratorExp,
    )
    count = 0
    for path in MODULES.values():
        for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(scope, scopes):
                own, todo = set(), [scope]
                while todo:
                    node = todo.pop()
                    own |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
                    own |= {node.arg} if isinstance(node, ast.arg) else set()
                    own |= {node.name} if isinstance(node, ast.ExceptHandler) else set()
                    todo += [part for part in ast.iter_child_nodes(node) if not isinstance(part, scopes)]
                count += len(own & vague)
    assert count < 150


def test_folders_keep_their_budgets():
    lines = dict.fromkeys(FLOOR_OF, 0)
    for path in MODULES.values():
        lines[part_of(path)] += path.read_text(encoding="utf-8").count("\n")
    budgets = {part: budget for part, _, budget in FLOORS}
    assert {part: count for part, count in lines.items() if count > budgets[part]} == {}
    folders = {path.parent for path in MODULES.values()}
    assert [folder.name for folder in folders if len(list(folder.glob("*.py"))) > 40] == []
    assert [part for part, count in lines.items() if not count] == [], "these entries of FLOORS are empty"


def test_every_benchmark_is_listed_in_reproduce_md():
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "reproduce.md").read_text(encoding="utf-8")
    scripts = [path.name for path in (Path(__file__).parent / "benchmarks").glob("bench_*.py")]
    assert [name for name in scripts if name not in page] == []


def test_xtk_imports_are_at_module_level_except_in_commands_and_pages():
    """Commands and pages import inside of functions, for a fast --help."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if part_of(path) in ("commands", "pages"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inner_nodes = [node for function in functions for node in ast.walk(function)]
        modules = [[alias.name for alias in node.names] for node in inner_nodes if isinstance(node, ast.Import)]
        modules += [[node.module or ""] for node in inner_nodes if isinstance(node, ast.ImportFrom)]
        found += [f"{path.name}: {name}" for names in modules for name in names if name.split(".")[0] == "xtk"]
    assert found == []


def test_help_imports_no_heavy_libraries():
    script = f"import sys; import xtk.cli; print(sorted({HEAVY!r} & set(sys.modules)))"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


def test_projection_commands_do_not_import_torch(pair, tmp_path):
    arguments = ["build-projection", str(pair.student), str(pair.teacher), "-o", str(tmp_path / "p")]
    script = (
        f"import sys; from xtk.cli import run_command; assert run_command({arguments!r}) == 0; "
        "print(sorted({'torch', 'transformers', 'pyarrow', 'numba'} & set(sys.modules)), file=sys.stderr)"
    )
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stderr.splitlines()[-1] == "[]"


def test_numba_kernels_are_compiled_at_their_first_call():
    # `minimal_spans` calls a kernel of the same module; it is called from several threads at once.
    script = """
import sys, threading
import numpy as np
import xtk.cache.codec.logprob_decoding_numba, xtk.losses.kernels.byte_kl_numba, xtk.text.different_text_alignment
from xtk.text.alignment_numba import minimal_spans
print('numba' in sys.modules, file=sys.stderr)
found = []
ends = np.array([1, 3, 4], np.int32), np.array([2, 3, 4], np.int32)
threads = [threading.Thread(target=lambda: found.append(minimal_spans(*ends).tolist())) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found, file=sys.stderr)
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stderr.splitlines() == ["False", str([[[0, 2, 0, 2], [2, 3, 2, 3]]] * 4)]


def test_functions_and_files_are_short():
    long_files = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 500:
            long_files.append(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
                assert num_lines <= 80, f"{path.name}: {node.name} has {num_lines} lines"
                signature = node.args
                parameters = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg]
                num_parameters = sum(parameter is not None for parameter in [*parameters, signature.kwarg])
                assert num_parameters <= 12, f"{path.name}: {node.name} has {num_parameters} parameters"
    assert len(long_files) <= 3, long_files


def test_package_does_not_print_or_pickle():
    forbidden = {"print", "torch.save", "torch.load"}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not called & forbidden, f"{path.name}: {called & forbidden}"
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not imported & {"pickle", "cloudpickle", "dill"}, path.name


def test_names_of_test_modules_are_unique():
    # pytest treats files of the same name as one module, and fails to collect the second one in the same worker.
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert {name for name in names if names.count(name) > 1} == set()


def test_sessions_and_ci_name_tests_that_exist():
    root = Path(__file__).parent.parent
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in ("noxfile.py", ".ci/run", "pyproject.toml"))
    paths = set(re.findall(r"tests/[\w/]+[^\W_](?![\w{])(?:\.py)?", text))
    assert [path for path in sorted(paths) if not (root / path).exists()] == []
    selected = re.findall(r"-k (test_\w+)", text)
    assert selected
    for name in selected:
        assert list((root / "tests").rglob(f"{name}.py")), f"-k {name}: no module of this name"


def test_distribution_does_not_have_the_name_of_another_project():
    content = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert content["project"]["name"] == "xtk-distill"  # `xtk` on PyPI is another project
    assert list(content["project"]["scripts"]) == ["xtk"]
    assert content["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["xtk"]
