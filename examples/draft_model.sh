#!/usr/bin/env bash
# A draft model for speculative decoding from another family: it gets the target's tokenizer, learns from the target's
# own answers, and is measured before and after. Run it again to continue; finished steps are kept.
#
#   XTK_DATA=folder-with-corpora examples/draft_model.sh FOLDER TARGET DRAFT [FAMILY_DRAFT]
#
# TARGET and DRAFT are folders, GGUF files or hub ids, such as Qwen2.5-Coder-1.5B-Instruct and SmolLM2-135M-Instruct;
# FAMILY_DRAFT is a small model with the target's tokenizer, for comparison. Sizes, by default a smoke test:
#   PROMPTS=16 TEST_PROMPTS=4 LENGTH=64 TEST_LENGTH=64 STEPS=10 BATCH=4 BLOCKS=1,2,4,8 SEED=0
#   OBJECTIVES="tvd forward-kl mixture" DTYPE=auto
# DTYPE=bfloat16 is faster where the processor has instructions for it (avx512_bf16, amx_bf16); auto: float32 on a CPU.
set -euo pipefail
if [ -z "${XTK_DATA:-}" ] || [ -z "${3:-}" ]; then
  echo "skipped: set XTK_DATA, and give FOLDER TARGET DRAFT" >&2
  exit 0
fi
absolute() { if [ -e "$1" ]; then realpath "$1"; else echo "$1"; fi; }
target=$(absolute "$2") draft=$(absolute "$3") family=$(absolute "${4:-}")
length=${LENGTH:-64} test_length=${TEST_LENGTH:-64} steps=${STEPS:-10} blocks=${BLOCKS:-1,2,4,8} seed=${SEED:-0}
objectives=${OBJECTIVES:-tvd forward-kl mixture} dtype=${DTYPE:-auto}
case $dtype in bfloat16) precision=bf16 ;; *) precision=auto ;; esac
mkdir -p "$1"
cd "$1"

# Prompts of maths (GSM8K) and code (HumanEval); those of the measurement are held out.
[ -s test.jsonl ] || python - "$XTK_DATA" "${PROMPTS:-16}" "${TEST_PROMPTS:-4}" <<'PYTHON'
import gzip, json, sys
from pathlib import Path

corpora, train, test = Path(sys.argv[1]) / "corpora", int(sys.argv[2]), int(sys.argv[3])
maths = {
    name: [json.loads(line)["question"] for line in (corpora / f"gsm8k_{name}.jsonl").read_text().splitlines()]
    for name in ("train", "test")
}
with gzip.open(corpora / "HumanEval.jsonl.gz", "rt") as file:
    code = [f"Complete this Python function.\n\n```python\n{json.loads(line)['prompt']}```" for line in file]
half = test // 2
code_train = min(train // 2, len(code) - 2 * half)
selected = {
    "train": [*maths["train"][: train - code_train], *code[:code_train]],
    "held-out": [*maths["train"][-(test - half) :], *code[len(code) - 2 * half : len(code) - half]],
    "test": [*maths["test"][: test - half], *code[len(code) - half :]],
}
for name, prompts in selected.items():
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
PYTHON

# The draft with the target's tokenizer: new rows from the old ones, and random ones for comparison.
xtk transplant "$draft" "$target" -o start
xtk transplant "$draft" "$target" --method random -o random

# The target's own answers, and its log-probabilities of them.
for name in train held-out; do
  xtk rollout "$target" $name.jsonl --apply-chat-template --max-completion-length "$length" --dtype "$dtype" \
    --batch-tokens 16384 --seed "$seed" -o answers-$name.jsonl
  xtk cache-teacher "$target" answers-$name.jsonl --top-k 64 --dtype "$dtype" -o cache-$name
done

drafts="random start"
for objective in $objectives; do
  case $objective in
    mixture) loss="--loss tvd:weight=0.5 --loss forward-kl:weight=0.5" ;;
    *) loss="--loss $objective" ;;
  esac
  xtk distill start cache-train $loss --max-steps "$steps" --per-device-train-batch-size "${BATCH:-4}" \
    --learning-rate 3e-4 --warmup-ratio 0.1 --save-steps 100 --mixed-precision "$precision" --seed "$seed" -o "$objective"
  drafts="$drafts $objective"
done
case $family in *.gguf) link=family.gguf ;; *) link=family ;; esac
if [ -n "$family" ]; then ln -sfn "$family" $link && drafts="$drafts $link"; fi

# The estimate from the cache, then real blocks: greedy and sampled, all drafts on the same prompts.
for name in $drafts; do
  [ -s estimate-$name.json ] || { xtk evaluate $name cache-held-out --json > part.json && mv part.json estimate-$name.json; }
done
best=${objectives%% *} others=()
for name in $drafts; do
  [ "$name" = "$best" ] || others+=(--compare-to "$name")
done
for temperature in 0 1; do
  result=measured-$temperature.json
  [ -s $result ] || { xtk evaluate-draft "$best" "$target" test.jsonl "${others[@]}" --apply-chat-template \
    --temperature $temperature --max-completion-length "$test_length" --num-draft-tokens "$blocks" --dtype "$dtype" \
    --seed "$seed" --html draft-$temperature.html --force --json > part.json && mv part.json $result; }
done

# The original draft with its own tokenizer: re-tokenized proposals (greedy) and the vocabularies' intersection (sampled),
# as transformers does it; then the first trained draft as an assistant of transformers.
python - "$target" "$draft" "$best" "$test_length" "$seed" "$dtype" <<'PYTHON'
import json, sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import candidate_generator

from xtk.evaluation.standard_errors import Ratio
from xtk.models.resolver import resolve_model_folder

target_name, draft_name, trained = sys.argv[1:4]
length, seed, dtype = int(sys.argv[4]), int(sys.argv[5]), torch.bfloat16 if sys.argv[6] == "bfloat16" else torch.float32
K = 4
# transformers prunes the draft's head to the common tokens and then assigns its logits to other tokens (5.24: the order of
# a hash map against that of ids), so nearly every proposal is accepted and the text is not the target's. With the whole head:
get_translator = candidate_generator.AssistantVocabTranslatorCache.get_translator
candidate_generator.AssistantVocabTranslatorCache.get_translator = staticmethod(
    lambda *positional, **options: get_translator(*positional, **{**options, "assistant_prune_lm_head": False})
)
proposed, accepted, emitted = [], [], []  # of each block: proposed ids, how many were accepted, and how many became text
for kind in ("AssistedCandidateGenerator", "AssistedCandidateGeneratorDifferentTokenizers",
             "UniversalSpeculativeDecodingGenerator"):  # fmt: skip
    class_ = getattr(candidate_generator, kind)
    if "get_candidates" in vars(class_):
        def counted(self, input_ids, _original=class_.get_candidates, **options):
            candidates = _original(self, input_ids, **options)
            proposed.append(candidates[0][0, input_ids.shape[1] :].tolist())
            return candidates
        class_.get_candidates = counted
base = candidate_generator.AssistedCandidateGenerator
original_update = base.update_candidate_strategy

def update(self, input_ids, scores, num_matches):
    block, matches = proposed[-1], int(num_matches)
    # Where the text ends inside of a block, its last accepted proposal counts as the target's own token.
    is_cropped = matches < len(block) and block[matches] == int(input_ids[0, -1])
    accepted.append(matches + is_cropped)
    emitted.append(matches + 1)
    return original_update(self, input_ids, scores, num_matches)

base.update_candidate_strategy = update

def load(name):
    folder = resolve_model_folder(name, with_weights=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.num_assistant_tokens = K
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model, AutoTokenizer.from_pretrained(folder)

target, tokenizer = load(target_name)
prompts = [json.loads(line)["prompt"] for line in Path("test.jsonl").read_text().splitlines()]
for label, name in {"intersection": draft_name, "transformers": trained}.items():
    assistant, assistant_tokenizer = load(name)
    more = {} if name != draft_name else {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    for sampled in (False, True) if label == "intersection" else (False,):
        if Path(f"measured-{label}-{int(sampled)}.json").exists():
            continue
        torch.manual_seed(seed)
        counts = []  # of each prompt: accepted proposals, verified ones, blocks
        for prompt in prompts:
            for counts_of_blocks in (proposed, accepted, emitted):
                counts_of_blocks.clear()
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.no_grad():
                target.generate(**ids, assistant_model=assistant, do_sample=sampled, max_new_tokens=length,
                                **({"top_k": 0, "top_p": 1.0, "temperature": 1.0,
                                   "repetition_penalty": 1.0} if sampled else {}), **more)
            rejected = sum(matches < len(block) for block, matches in zip(proposed, accepted))
            counts.append((sum(accepted), sum(accepted) + rejected, sum(emitted), len(accepted)))
        of_prompts = dict(zip(("accepted", "verified", "emitted", "blocks"), np.array(counts, float).T))
        acceptance = Ratio(of_prompts["accepted"], of_prompts["verified"]).estimate()
        length_of_block = Ratio(of_prompts["emitted"], of_prompts["blocks"]).estimate()
        figures = {"num_draft_tokens": K, "blocks": int(of_prompts["blocks"].sum()),
                   "acceptance": acceptance.value, "acceptance_error": acceptance.finite_error,
                   "accepted_length": length_of_block.value, "accepted_length_error": length_of_block.finite_error}
        Path(f"measured-{label}-{int(sampled)}.json").write_text(json.dumps(figures))
PYTHON

# The table, for blocks of 4 proposals or of the largest measured size.
python - $drafts <<'PYTHON'
import json, sys
from pathlib import Path

records = [json.loads(Path(f"measured-{temperature}.json").read_text()) for temperature in (0, 1)]

def numbers(name, temperature):
    if name == "intersection":
        return json.loads(Path(f"measured-{name}-{temperature}.json").read_text())
    record = records[temperature]
    blocks = next(one for one in (record, *record["compared"]) if one["draft"] == name)["block_sizes"]
    return next((one for one in blocks if one["num_draft_tokens"] == 4), blocks[-1])

def cell(record, key, digits=3):
    error = record.get(f"{key}_error")
    return f"{record[key]:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "") if key in record else ""

print("| draft | greedy: acceptance | estimate | accepted length | speed-up here | at cost 0.1, 0.05 "
      "| temperature 1: acceptance | estimate | accepted length |\n" + "| --- " * 9 + "|")
for name in ("intersection", *sys.argv[1:]):
    greedy, sampled = numbers(name, 0), numbers(name, 1)
    path = Path(f"estimate-{name}.json")
    estimate = json.loads(path.read_text()) if path.exists() else {}
    ratios = [f"{greedy['by_cost_ratio'][c]['expected_speed_up']:.2f}" for c in ("0.1", "0.05")] if "by_cost_ratio" in greedy else []
    print("|", " | ".join([
        name, cell(greedy, "acceptance"), cell(estimate, "top1_agreement"), cell(greedy, "accepted_length", 2),
        cell(greedy, "speed_up", 2), ", ".join(ratios), cell(sampled, "acceptance"),
        cell(estimate, "acceptance_on_text"), cell(sampled, "accepted_length", 2)]), "|")
for temperature, record in enumerate(records):
    print(f"temperature {temperature}: a draft step costs {record['cost_ratio']:.3f} target steps, verifying a block of "
          f"{record['block_sizes'][-1]['num_draft_tokens']} {record['block_sizes'][-1]['verification_cost']:.2f}; "
          f"acceptance of {record['draft']} minus that of "
          + ", ".join(f"{one['draft']}: {cell(one['block_sizes'][-1], 'acceptance_difference')}" for one in record["compared"]))
PYTHON
