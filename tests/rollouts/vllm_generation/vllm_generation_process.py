"""Write with vLLM in this process, before and after new weights; tell what was written: OLD NEW OUT OPTION..."""

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
    from rollouts.vllm_generation.generation_requests import CONTEXT, GREEDY, SAMPLED, asks_of, request_of
    from safetensors.torch import load_file

    from xtk.errors import XtkError
    from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
    from xtk.rollouts.vllm_generator import VllmGenerator

    old, new, out = map(Path, sys.argv[1:4])
    told: dict[str, Any] = {}

    def states() -> list[Any]:
        return [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    def words(completions: list[Completion]) -> list[Any]:
        return [
            (
                one.ids.tolist(),
                one.logprobs.tolist(),
                one.finish_reason,
                None if one.top_ids is None else one.top_ids.tolist(),
            )
            for one in completions
        ]

    def error(work: Any, *arguments: Any) -> str:
        try:
            work(*arguments)
        except XtkError as wrong:
            return str(wrong)
        return ""

    random.seed(4)
    before = states()
    writer = VllmGenerator.open(request_of(old, engine=sys.argv[4:]))
    told["draws are untouched"] = states() == before
    told["context"] = writer.context_length
    asks = asks_of()
    told["sampled"] = words(writer.generate(asks, SAMPLED))
    told["backwards"] = words(writer.generate(asks[::-1], SAMPLED)[::-1])
    told["greedy"] = words(writer.generate(asks, GREEDY))
    told["nothing"] = writer.generate([], SAMPLED)
    told["too long"] = error(writer.generate, [GenerationRequest(np.ones(CONTEXT, np.int32), (1,))], SAMPLED)
    told["too hot"] = error(writer.generate, asks, SamplingConfig(temperature=2.5))
    writer._reload(weights_path=str(new))  # as `update` does, without the end
    told["stale"] = words(writer.generate(asks, SAMPLED))
    writer.update_weights(new)
    told["updated"] = words(writer.generate(asks, SAMPLED))
    weights = load_file(old / "model.safetensors")
    writer.update_weights(weights.items())
    told["told back"] = words(writer.generate(asks, SAMPLED))
    writer.sleep()
    writer.wake_up()
    told["rested"] = words(writer.generate(asks, SAMPLED))
    told["missing"] = error(writer.update_weights, list(weights.items())[1:])
    out.write_text(json.dumps(told))
    writer.close()


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
