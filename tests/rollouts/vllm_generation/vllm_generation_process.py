"""Generate with vLLM in this process before and after weight updates, and write the results: OLD NEW OUT OPTION..."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    import numpy as np
    import torch
    from rollouts.vllm_generation.generation_requests import CONTEXT, GREEDY, SAMPLED, backend_config, make_requests
    from safetensors.torch import load_file, save_file

    from xtk.errors import XtkError
    from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
    from xtk.rollouts.vllm_generator import VllmGenerator

    old, new, out = map(Path, sys.argv[1:4])
    results: dict[str, Any] = {}

    def random_states() -> list[Any]:
        return [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    def to_rows(completions: list[Completion]) -> list[Any]:
        return [
            (
                one.ids.tolist(),
                one.logprobs.tolist(),
                one.finish_reason,
                None if one.top_ids is None else one.top_ids.tolist(),
            )
            for one in completions
        ]

    def error_message(call: Any, *arguments: Any) -> str:
        try:
            call(*arguments)
        except XtkError as error:
            return str(error)
        return ""

    random.seed(4)
    states_before = random_states()
    generator = VllmGenerator.open(backend_config(old, engine=sys.argv[4:]))
    results["random state is kept"] = random_states() == states_before
    results["context"] = generator.context_length
    requests = make_requests()
    results["sampled"] = to_rows(generator.generate(requests, SAMPLED))
    results["backwards"] = to_rows(generator.generate(requests[::-1], SAMPLED)[::-1])
    results["greedy"] = to_rows(generator.generate(requests, GREEDY))
    results["nothing"] = generator.generate([], SAMPLED)
    results["too long"] = error_message(
        generator.generate, [GenerationRequest(np.ones(CONTEXT, np.int32), (1,))], SAMPLED
    )
    results["too hot"] = error_message(generator.generate, requests, SamplingConfig(temperature=2.5))
    generator._reload(new)  # as `update_weights` does, but without its last step
    results["stale"] = to_rows(generator.generate(requests, SAMPLED))
    generator.update_weights(new)
    results["updated"] = to_rows(generator.generate(requests, SAMPLED))
    generator.update_weights(old)
    results["weights restored"] = to_rows(generator.generate(requests, SAMPLED))
    generator.sleep()
    generator.wake_up()
    results["rested"] = to_rows(generator.generate(requests, SAMPLED))
    weights = load_file(old / "model.safetensors")
    weights.popitem()
    save_file(weights, out.parent / "model.safetensors")
    results["missing"] = error_message(generator.update_weights, out.parent)
    out.write_text(json.dumps(results))
    generator.close()


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
