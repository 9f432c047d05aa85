"""However weights, matrices and rows are shared: the loss, the gradient and its norm are those of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import material
import pytest
import torch
from safetensors.torch import load_file

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.evaluation.bits import bits_per_byte
from xtk.models.causal_lm import Cut, load_causal_lm
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.layout import Layout, read_layout

LOSSES = "ce:weight=0.5 p-kl boundary-kl:weight=0.25 byte-kl:weight=2 alm uld:weight=0.5 gold h-kl:weight=0.25"
# Whose names they have, and in which ways eight and five documents are taken: in passes of so many, over all processes.
WAYS = {1: ["8:2", "5:5"], 2: ["8:4", "5:5"], 3: ["5:2"], 4: ["8:2", "5:2"], 8: ["8:2"]}
LIKE_ONE = {
    # A budget of 10 is less than any document has.
    1: [{}, {"max_batch_tokens": 100}, {"max_batch_tokens": 10}, {"max_batch_tokens": 100, "packing": False},
        {"gradient_checkpointing": True}],
    2: [
        {"parallel": "fsdp=2"},
        {"parallel": "fsdp=2", "fsdp_offload": True, "max_batch_tokens": 70},
        {"parallel": "tp=2"},
        {"parallel": "cp=2", "max_batch_tokens": 90, "gradient_checkpointing": True},
    ],
    4: [{"parallel": "tp=2,cp=2", "max_batch_tokens": 90}, {"parallel": "fsdp=2,tp=2"}],
}  # fmt: skip
LIKE_ONE_LONG = {
    2: [{"parallel": "cp=2"}],
    3: [{"parallel": "cp=3"}, {"parallel": "fsdp=3"}],
    4: [
        {"parallel": "dp=2,tp=2", "gradient_checkpointing": True},
        {"parallel": "dp=2,fsdp=2"},
        {"parallel": "fsdp=2,cp=2"},
        {"parallel": "cp=2"},
    ],
    8: [{"parallel": "dp=2,tp=2,cp=2"}, {"parallel": "fsdp=2,tp=2,cp=2"}, {"parallel": "dp=2,fsdp=2,cp=2"}],
}
STUDENTS = ("llama", "tied")
CONTEXT = 24  # tokens, of held-out documents, some of which have more


@pytest.fixture(scope="module")
def cache(run, pair, tmp_path_factory) -> Path:
    """Ten documents, as the teacher said it."""
    folder = tmp_path_factory.mktemp("exact")
    material.write_jsonl(folder / "data.jsonl", material.sentences(10, seed=8))
    run("cache-teacher", pair.teacher, "data.jsonl", "--top-k", 16, "--precision", "float32", "-o", "cache", cwd=folder)
    return folder / "cache"


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, Path]:
    """Two that can be cut in two: a Llama, and a Qwen3 whose head is its embedding. 657 rows are not cut evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("students")
    size = {"vocab_size": 657, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, **size)),
        "tied": lambda: Qwen3ForCausalLM(
            Qwen3Config(hidden_size=48, intermediate_size=96, head_dim=16, tie_word_embeddings=True, **size)
        ),
    }
    for name, make in models.items():
        material.make_student_tokenizer(folder / name)
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
    return {name: folder / name for name in models}


def name_of(student: str, options: dict[str, object]) -> str:
    return " ".join([student, *(f"{name}={value}" for name, value in options.items())])


@pytest.fixture(scope="module")
def dump(cache, students, tmp_path_factory):
    """What so many processes got, in all their ways; they are started once."""
    known: dict[tuple[int, bool], tuple[Path, dict[str, dict[str, dict[str, object]]]]] = {}

    def of(processes: int, long: bool = False):
        if (processes, long) not in known:
            folder = tmp_path_factory.mktemp(f"of-{processes}")
            cases = [
                {"name": name_of(student, options), "student": str(students[student]), "options": options, "ways": ways}
                for student in STUDENTS
                for options, ways in [
                    *((options, WAYS[processes]) for options in (LIKE_ONE_LONG if long else LIKE_ONE)[processes]),
                    *([({"packing": False}, ["8:8", "5:5"])] if processes == 1 else []),
                ]
            ]
            every = {"caches": [str(cache)], "projections": [], "losses": LOSSES.split(" "),
                     "held_out": [str(cache)], "context": CONTEXT}  # fmt: skip
            asked = {"output": str(folder), "cases": [{**every, **case} for case in cases]}
            launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                        "--nproc-per-node", str(processes)] if processes > 1 else []  # fmt: skip
            script = Path(__file__).parent / "dump_gradients.py"
            paths = [str(Path(material.__file__).parent), os.environ.get("PYTHONPATH", "")]
            done = subprocess.run(
                [sys.executable, *launcher, str(script), json.dumps(asked)],
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                     "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(paths)},
                timeout=600,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            known[processes, long] = (folder, json.loads((folder / "told.json").read_text()))
        return known[processes, long]

    return of


CASES = [
    pytest.param(
        processes, student, options, long, id=f"{processes} {name_of(student, options)}",
        marks=[pytest.mark.long] * long,
    )
    for long, table in enumerate((LIKE_ONE, LIKE_ONE_LONG))
    for processes, several in table.items()
    for student in STUDENTS
    for options in several
]  # fmt: skip


@pytest.mark.parametrize(("processes", "student", "options", "long"), CASES)
def test_the_gradient_is_that_of_one_process_and_one_pass(dump, processes, student, options, long):
    alone, expected_told = dump(1)
    folder, told = dump(processes, bool(long))
    name, plain = name_of(student, options), name_of(student, {"packing": False})
    for way in WAYS[processes]:
        documents = way.split(":")[0]
        ours, theirs = told[name][way], expected_told[plain][f"{documents}:{documents}"]
        assert (ours["processes"], ours["packed"]) == (processes, options.get("packing", True))
        expected = load_file(alone / f"{plain}-{documents}-{documents}.safetensors")
        found = load_file(folder / f"{name}-{way.replace(':', '-')}.safetensors")
        assert expected.keys() == found.keys()
        for parameter, gradient in expected.items():
            scale = float(gradient.abs().max())
            assert scale > 0
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-5, atol=2e-6 * scale, msg=parameter)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=2e-6)
        for one, other in zip(ours["losses"], theirs["losses"], strict=True):
            assert one == pytest.approx(other, rel=2e-6)


@pytest.mark.parametrize(("processes", "student", "options", "long"), CASES)
def test_the_evaluation_is_that_of_one_process(dump, students, cache, processes, student, options, long):
    """Nothing is moved by the steps, so before, between and after them it is the same too."""
    expected = dump(1)[1][name_of(student, {"packing": False})]["8:8"]["held_out"][0]
    for way in dump(processes, bool(long))[1][name_of(student, options)].values():
        assert len(way["held_out"]) == 3
        for found in way["held_out"]:
            assert found == pytest.approx(expected, rel=2e-6)
    documents = [row.document for row in TeacherCache(cache)]
    alone = bits_per_byte(
        Cut(load_causal_lm(students[student])), Tokenizer(students[student]), documents, max_length=CONTEXT
    )
    assert alone.windows > len(documents)
    assert expected["eval_bits_per_byte"] == pytest.approx(alone.bits_per_byte, rel=1e-6)
    names = ["bits_per_byte", "loss", "kd", "top1_agreement", *(loss.split(":")[0] for loss in LOSSES.split(" "))]
    assert set(expected) == {f"eval_{name}" for name in names}


def test_a_budget_of_tokens_makes_more_passes_of_the_same_step(dump):
    told = dump(1)[1]
    passes = {options: told[f"llama {options}"]["8:2"]["passes"] for options in ("max_batch_tokens=100",)}
    assert passes["max_batch_tokens=100"] == 3
    assert told["llama max_batch_tokens=100 packing=False"]["8:2"]["passes"] >= 3


# --- through the command: checkpoints of one layout, read by another


@pytest.mark.long
def test_a_run_goes_on_in_another_layout(run, cache, students, tmp_path):
    def train(name: str, batch: int, *options: object) -> dict[str, torch.Tensor]:
        losses = ("--loss", "ce", "--loss", "byte-kl", "--ema-decay", 0.5, "--learning-rate", 1e-3)
        steps = ("--max-steps", 4, "--save-steps", 2, "--logging-steps", 1, "--per-device-train-batch-size", batch)
        run("distill", students["tied"], cache, *losses, *steps, *options, "-o", tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    def halfway(name: str) -> None:
        """Leave what a run that was killed after its checkpoint would have left."""
        shutil.copytree(tmp_path / "tp" / "checkpoint-2", tmp_path / name / "checkpoint-2")
        for file in ("recipe.json", "metrics.jsonl"):
            shutil.copyfile(tmp_path / "tp" / file, tmp_path / name / file)

    one = train("one", 8)
    cut = train("tp", 8, "--num-processes", 2, "--parallel", "tp=2")
    for name in ("again", "other"):
        halfway(name)
    again = train("again", 8, "--num-processes", 2, "--parallel", "tp=2")
    other = train("other", 4, "--num-processes", 2, "--parallel", "fsdp=2")
    for name, weight in one.items():
        assert torch.equal(again[name], cut[name])
        for found in (cut[name], other[name]):
            assert float((found - weight).abs().max()) <= 5e-5 * float(weight.abs().max()), name


# --- what `--parallel` says


@pytest.mark.parametrize(
    ("text", "processes", "expected"),
    [
        ("", 1, Layout()),
        ("", 6, Layout(dp=6)),
        ("fsdp=2,tp=2", 8, Layout(dp=2, fsdp=2, tp=2)),
        ("tp=4, cp=2", 8, Layout(cp=2, tp=4)),
        ("dp=2,cp=2", 4, Layout(dp=2, cp=2)),
    ],
)
def test_what_is_not_named_is_one_and_replicas_are_what_is_left(text, processes, expected):
    assert read_layout(text, processes) == expected


@pytest.mark.parametrize(
    ("text", "processes", "message"),
    [
        ("tp=3", 4, "--parallel tp=3 needs a multiple of 3 processes, and there are 4"),
        ("dp=1,tp=2", 4, "--parallel dp=1,tp=2 needs 2 processes, and there are 4"),
        ("pp=2", 2, "no way to share the work called 'pp'"),
        ("tp", 2, "'tp' is not NAME=NUMBER"),
        ("tp=0", 2, "'tp=0' is not NAME=NUMBER"),
        ("tp=2,tp=2", 4, "'tp=2' is not NAME=NUMBER"),
    ],
)
def test_what_cannot_be_is_refused(text, processes, message):
    with pytest.raises(XtkError) as refused:
        read_layout(text, processes)
    assert message in str(refused.value)


def test_what_a_model_cannot_is_refused_and_nothing_is_left(run, pair, cache, tmp_path):
    asked = ["distill", pair.student, cache, "--num-processes", 2, "--max-steps", 2, "-o", tmp_path / "out"]
    done = run(*asked, "--parallel", "tp=2", code=1)
    assert "2 heads and 1 key-value heads are not cut into 2" in done.stderr
    assert "--parallel fsdp" in done.stderr
    assert not (tmp_path / "out" / "xtk.json").exists()
    done = run(*asked, "--parallel", "tp=3", code=1)
    assert "--parallel tp=3 needs a multiple of 3 processes, and there are 2" in done.stderr


def test_a_plan_tells_what_each_number_means():
    layout = read_layout("fsdp=2,tp=2", 8)
    assert layout.plan() == "8 processes: 2 replicas x 2 shards of the weights x 2 pieces of matrices"
    assert str(layout) == "dp=2,fsdp=2,tp=2"
