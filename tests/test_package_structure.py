"""The structure of the package: layers, lazy imports, a fast --help, short functions, forbidden calls."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "xtk"

# Imports only go to lower layers. Within a layer, only the parts of layer 0 and the pairs below import each other.
LAYERS = {
    "errors": 0, "name_registry": 0, "terminal": 0, "subprocesses": 0, "user_code": 0,
    "writable_cache_folders": 0, "untrusted_json": 0, "options": 0, "numba_kernel": 0,
    "tokens": 1,
    "projection": 2, "models": 2, "engines": 2,
    "artifacts": 3, "losses": 3,
    "teachers": 4, "rewards": 4, "rollouts": 4, "transplant": 4,
    "evaluation": 5, "training": 5,
    "quickstart": 6, "doctor": 6, "commands": 6, "library": 6,
    "cli": 7, "integrations": 7, "__main__": 8,
}  # fmt: skip
ALLOWED_WITHIN_LAYER = {
    ("training", "evaluation"), ("commands", "quickstart"), ("commands", "doctor"), ("commands", "library"),
    ("rollouts", "rewards"),
}  # fmt: skip
HEAVY = {"torch", "transformers", "pyarrow", "numba", "accelerate", "datasets", "numpy", "safetensors", "matplotlib"}


def imported_parts(path: Path) -> set[str]:
    """Return the parts of xtk (folders, or modules outside of folders) that a file imports, in functions too."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "xtk":
                names = [f"xtk.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("xtk.")}
    return parts - {"__version__"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_to_lower_layers(path):
    part = part_of(path)
    if part == "__init__":
        return
    for imported in imported_parts(path) - {part}:
        allowed = (
            LAYERS[imported] < LAYERS[part]
            or (part, imported) in ALLOWED_WITHIN_LAYER
            or LAYERS[imported] == 0 == LAYERS[part]
        )
        assert allowed, f"{part} imports {imported}"


def test_every_benchmark_is_listed_in_reproduce_md():
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "reproduce.md").read_text(encoding="utf-8")
    scripts = [path.name for path in (Path(__file__).parent / "benchmarks").glob("bench_*.py")]
    assert [name for name in scripts if name not in page] == []


def test_xtk_imports_are_at_module_level_except_in_commands():
    """Commands import inside of functions, for a fast --help."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if part_of(path) == "commands":
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
