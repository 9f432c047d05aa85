"""Packed documents have the same hidden states as single documents for every model family, or packing is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import ATTENTION_NAME, PackedSequence

V = 90
SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
# Packed attention of each family: xtk's, its own with boundaries from position ids, or none (one document per row).
FAMILIES = {
    "LlamaConfig": (LLAMA, "xtk"),
    "Qwen3Config": ({**LLAMA, "head_dim": 8}, "xtk"),
    "MistralConfig": ({**LLAMA, "sliding_window": 3}, "xtk"),
    "Gemma2Config": ({**LLAMA, "head_dim": 8, "sliding_window": 3}, "its own"),
    "Gemma3TextConfig": ({**LLAMA, "head_dim": 8, "sliding_window": 3}, "xtk"),
    "GPTNeoXConfig": ({**SIZES, "intermediate_size": 48}, "xtk"),
    "GPT2Config": ({"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4}, "xtk"),
    "MixtralConfig": ({**LLAMA, "num_local_experts": 4}, "xtk"),
    "BloomConfig": ({"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "a row each"),
    "MambaConfig": ({"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "a row each"),
}  # fmt: skip


def make_model(family: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, family)(**FAMILIES[family][0])).eval()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_packed_documents_have_the_same_hidden_states_as_single_ones(family, tmp_path):
    model = make_model(family)
    backbone, attention = BackboneWithHead(model), FAMILIES[family][1]
    documents = [torch.randint(0, V, (1, length)) for length in (9, 1, 6, 20)]
    single_states = [backbone(ids) for ids in documents]
    assert backbone.enable_packing() == (attention != "a row each")
    assert backbone.supports_context_parallel == (attention == ATTENTION_NAME)
    # Padded batches, in evaluation or without packing support, are unchanged.
    for ids, states in zip(documents, single_states, strict=True):
        torch.testing.assert_close(backbone(ids), states, rtol=1e-5, atol=1e-5)
    if backbone.enable_packing():
        packed_states = backbone(torch.cat(documents, dim=1), PackedSequence((9, 1, 6, 20)))
        torch.testing.assert_close(packed_states, torch.cat(single_states, dim=1), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_padded_batches_are_unchanged_after_enabling_packing():
    backbone = BackboneWithHead(make_model("LlamaConfig"))
    ids = torch.randint(1, V, (3, 12))
    expected = backbone(ids)
    assert backbone.enable_packing()
    torch.testing.assert_close(backbone(ids), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_context_parallel_shards_attend_to_their_documents(world_size):
    lengths = (5, 1, 9, 9)
    document_ends = torch.tensor(lengths).cumsum(0)
    document_starts = document_ends - torch.tensor(lengths)
    all_tokens = []
    for rank in range(world_size):
        sequence = PackedSequence(lengths, None, world_size, rank)
        rank_tokens = sequence.token_indices(rank)
        all_tokens += rank_tokens.tolist()
        attended = {}
        for query_start, query_stop, key_start, key_stop in sequence.attention_segments():
            for token in range(query_start, query_stop):
                attended[int(rank_tokens[token])] = (key_start, key_stop - (query_stop - 1 - token))
        document_indices = torch.searchsorted(document_ends, torch.tensor(rank_tokens), right=True)
        expected = {
            int(token): (int(document_starts[document_index]), int(token) + 1)
            for token, document_index in zip(rank_tokens, document_indices, strict=True)
        }
        assert attended == expected
        assert len(rank_tokens) == sum(lengths) // world_size
    assert sorted(all_tokens) == list(range(sum(lengths)))


class ElementCounter(TorchDispatchMode):
    """Counts the elements of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            self.count += tensor.numel() if isinstance(tensor, torch.Tensor) else 0
        return result


def test_backward_writes_no_more_elements_for_many_packed_documents():
    backbone = BackboneWithHead(make_model("LlamaConfig"))
    assert backbone.enable_packing()
    ids, element_counts = torch.randint(0, V, (1, 400)), {}
    for num_documents in (4, 50):
        states = backbone(ids, PackedSequence((400 // num_documents,) * num_documents))
        with ElementCounter() as counter:
            states.sum().backward()
        element_counts[num_documents] = counter.count
    assert element_counts[50] < 1.1 * element_counts[4]
