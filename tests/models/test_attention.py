"""Documents in a row are read as they are alone, whatever the model, or the row is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import ATTENTION_NAME, PackedSequence

V = 90
SIZE = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZE, "intermediate_size": 48, "num_key_value_heads": 2}
# What each is read by: ours, its own attention that learns of documents by positions, or not at all in one row.
FAMILIES = {
    "LlamaConfig": (LLAMA, "xtk"),
    "Qwen3Config": ({**LLAMA, "head_dim": 8}, "xtk"),
    "MistralConfig": ({**LLAMA, "sliding_window": 3}, "xtk"),
    "Gemma2Config": ({**LLAMA, "head_dim": 8, "sliding_window": 3}, "its own"),
    "Gemma3TextConfig": ({**LLAMA, "head_dim": 8, "sliding_window": 3}, "xtk"),
    "GPTNeoXConfig": ({**SIZE, "intermediate_size": 48}, "xtk"),
    "GPT2Config": ({"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4}, "xtk"),
    "MixtralConfig": ({**LLAMA, "num_local_experts": 4}, "xtk"),
    "BloomConfig": ({"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "a row each"),
    "MambaConfig": ({"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "a row each"),
}  # fmt: skip


def model_of(family: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, family)(**FAMILIES[family][0])).eval()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_documents_in_a_row_are_read_as_they_are_alone(family, tmp_path):
    model = model_of(family)
    cut, by = BackboneWithHead(model), FAMILIES[family][1]
    documents = [torch.randint(0, V, (1, length)) for length in (9, 1, 6, 20)]
    alone = [cut(ids) for ids in documents]
    assert cut.enable_packing() == (by != "a row each")
    assert cut.supports_context_parallel == (by == ATTENTION_NAME)
    # Those that go on padded, for evaluation or because they must, are read as before.
    for ids, states in zip(documents, alone, strict=True):
        torch.testing.assert_close(cut(ids), states, rtol=1e-5, atol=1e-5)
    if cut.enable_packing():
        found = cut(torch.cat(documents, dim=1), PackedSequence((9, 1, 6, 20)))
        torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_padded_batches_are_read_as_before():
    cut = BackboneWithHead(model_of("LlamaConfig"))
    ids = torch.randint(1, V, (3, 12))
    expected = cut(ids)
    assert cut.enable_packing()
    torch.testing.assert_close(cut(ids), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_row_is_dealt_from_both_ends_and_each_token_looks_at_its_document(ranks):
    lengths = (5, 1, 9, 9)
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    held = []
    for rank in range(ranks):
        row = PackedSequence(lengths, None, ranks, rank)
        own = row.token_indices(rank)
        held += own.tolist()
        looked = {}
        for first, past, start, stop in row.attention_segments():
            for token in range(first, past):
                looked[int(own[token])] = (start, stop - (past - 1 - token))
        document = torch.searchsorted(ends, torch.tensor(own), right=True)
        expected = {int(token): (int(starts[at]), int(token) + 1) for token, at in zip(own, document, strict=True)}
        assert looked == expected
        assert len(own) == sum(lengths) // ranks
    assert sorted(held) == list(range(sum(lengths)))


class ElementsWritten(TorchDispatchMode):
    """Counts the elements of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        for one in result if isinstance(result, tuple | list) else [result]:
            self.count += one.numel() if isinstance(one, torch.Tensor) else 0
        return result


def test_the_gradient_of_a_row_of_many_documents_writes_no_more_than_that_of_few():
    cut = BackboneWithHead(model_of("LlamaConfig"))
    assert cut.enable_packing()
    ids, written = torch.randint(0, V, (1, 400)), {}
    for count in (4, 50):
        states = cut(ids, PackedSequence((400 // count,) * count))
        with ElementsWritten() as elements:
            states.sum().backward()
        written[count] = elements.count
    assert written[50] < 1.1 * written[4]
