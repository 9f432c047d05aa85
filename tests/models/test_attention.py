"""Packed documents have the same hidden states as single documents for every model family, or packing is refused."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path

import pytest
import torch
from flash_attention_on_cpu import flash_attention_on_cpu
from simulated_cuda import CUDA, SimulatedCuda
from torch import Tensor, distributed, multiprocessing
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.gemma2 import modeling_gemma2

from xtk.models import packed_attention
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import ATTENTION_NAME, PackedSequence
from xtk.models.small_copy import small_copy

CPU = torch.device("cpu")

V = 90
SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
# Packed attention of each family: xtk's, or none (one document per row).
FAMILIES = {
    "LlamaConfig": (LLAMA, "xtk"),
    "Qwen3Config": ({**LLAMA, "head_dim": 8}, "xtk"),
    "MistralConfig": ({**LLAMA, "sliding_window": 3}, "xtk"),
    "Gemma2Config": ({**LLAMA, "head_dim": 8, "sliding_window": 3}, "a row each"),  # eager
    "Gemma3TextConfig": ({**LLAMA, "head_dim": 8, "sliding_window": 3}, "xtk"),
    "GPTNeoXConfig": ({**SIZES, "intermediate_size": 48}, "xtk"),
    "GPT2Config": ({"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4}, "xtk"),
    "MixtralConfig": ({**LLAMA, "num_local_experts": 4}, "xtk"),
    "DeepseekV3Config": (  # keys of 16 per head, values of 8
        {**SIZES, "intermediate_size": 48, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2}, "xtk"),
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


def test_own_attention_that_is_not_eager_packs_where_that_of_xtk_cannot():
    """Gemma 2 caps its scores; an attention of its own, such as FlashAttention 2, may do so without [T, T] scores."""
    AttentionInterface.register("capping", modeling_gemma2.eager_attention_forward)
    AttentionMaskInterface.register("capping", eager_mask)
    model = make_model("Gemma2Config")
    model.set_attn_implementation("capping")
    backbone = BackboneWithHead(model)
    documents = [torch.randint(0, V, (1, length)) for length in (9, 1, 6)]
    single_states = [backbone(ids) for ids in documents]
    assert backbone.enable_packing()
    assert not backbone.supports_context_parallel
    packed_states = backbone(torch.cat(documents, dim=1), PackedSequence((9, 1, 6)))
    torch.testing.assert_close(packed_states, torch.cat(single_states, dim=1), rtol=1e-5, atol=1e-5)


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


DOCUMENTS = (9, 1, 6, 20)  # with windows of 3
OPERATOR_FAMILIES = [
    "LlamaConfig", "Qwen3Config", "MistralConfig", "Gemma3TextConfig", "GPT2Config", "DeepseekV3Config"
]  # fmt: skip


def make_ids(length: int) -> Tensor:
    return torch.randint(0, V, (1, length), generator=torch.Generator().manual_seed(length))


def states_and_gradients(backbone: BackboneWithHead, packed: PackedSequence) -> tuple[Tensor, dict[str, Tensor]]:
    """Return hidden states of this process's tokens, and gradients of a weighted sum of them."""
    own = torch.from_numpy(packed.token_indices(packed.rank))
    backbone.zero_grad()
    states = backbone(make_ids(packed.num_tokens)[:, own], packed)
    weights = torch.linspace(-1, 1, packed.num_tokens * states.shape[2]).reshape(1, packed.num_tokens, -1)
    (states * weights[:, own]).sum().backward()
    gradients = {name: values.grad for name, values in backbone.named_parameters() if values.grad is not None}
    return states.detach(), gradients


def assert_same_gradients(computed: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    assert computed.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(computed[name], gradient, rtol=0, atol=tolerance * float(gradient.abs().max()))


@pytest.mark.parametrize("family", OPERATOR_FAMILIES)
def test_varlen_attention_has_the_states_and_gradients_of_attention_by_document(family):
    """Also with grouped heads, which are not repeated, with windows, and with values smaller than keys."""
    backbone = BackboneWithHead(make_model(family))
    assert backbone.enable_packing()
    expected_states, expected = states_and_gradients(backbone, PackedSequence(DOCUMENTS))
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    with flash_attention_on_cpu() as kernels:
        states, gradients = states_and_gradients(backbone, PackedSequence(DOCUMENTS))
    key_heads = getattr(backbone.model.config, "num_key_value_heads", 4)
    call = {"segments": len(DOCUMENTS), "key_heads": key_heads, "dtype": torch.float32}
    assert (kernels.forward_calls, kernels.backward_calls) == ([call, call], 2)
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("num_documents", [1, 2, 60])
def test_a_layer_makes_one_varlen_call_for_any_number_of_documents(num_documents):
    backbone = BackboneWithHead(make_model("LlamaConfig"))
    assert backbone.enable_packing()
    with flash_attention_on_cpu() as kernels:
        backbone(make_ids(3 * num_documents), PackedSequence((3,) * num_documents))
    assert len(kernels.forward_calls) == 2


def test_varlen_attention_gets_the_dtype_of_autocast():
    backbone = BackboneWithHead(make_model("Qwen3Config"))
    assert backbone.enable_packing()
    with torch.autocast("cpu", torch.bfloat16):
        expected = backbone(make_ids(36), PackedSequence(DOCUMENTS))
        with flash_attention_on_cpu() as kernels:
            states = backbone(make_ids(36), PackedSequence(DOCUMENTS))
    assert [call["dtype"] for call in kernels.forward_calls] == [torch.bfloat16] * 2
    torch.testing.assert_close(states, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize(("reason", "size", "dtype", "dropout"), [
    ("dtype", 8, torch.float64, 0.0), ("head size", 6, torch.float32, 0.0), ("dropout", 8, torch.float32, 0.5)
])  # fmt: skip
def test_layers_that_varlen_attention_does_not_support_use_attention_by_document(reason, size, dtype, dropout):
    query, key, value = torch.randn(3, 1, 4, 36, size, dtype=dtype)
    with flash_attention_on_cpu() as kernels:
        packed = PackedSequence(DOCUMENTS)
        torch.manual_seed(0)
        output, _ = packed_attention.packed_attention(
            torch.nn.Module(), query, key, value, None, dropout, packed=packed
        )
    torch.manual_seed(0)
    expected = packed_attention._attend_by_document(query, key, value, dropout, None, None, packed)
    assert kernels.forward_calls == []
    assert torch.equal(output, expected)


def test_a_cpu_has_no_varlen_attention():
    assert not packed_attention.has_varlen_attention(torch.device("cpu"))


def test_the_host_does_not_wait_for_the_arguments_of_varlen_attention(monkeypatch):
    monkeypatch.setattr(packed_attention, "has_varlen_attention", lambda device: True)
    for num_ranks in (1, 2):
        packed = PackedSequence(DOCUMENTS, None, num_ranks)
        with SimulatedCuda() as device:
            packed.prepare(CUDA)
        assert packed.varlen_calls[CUDA] is not None
        assert not device.waits


# A warning of torch about itself: dynamo reads this attribute of the inputs of a graph after a break.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("operator", [True, False])
def test_compiled_packed_attention_is_not_compiled_again_for_other_numbers_of_documents(operator):
    """The operator is a part of the only graph; attention by document is a break per layer."""
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (BackboneWithHead(make_model("MistralConfig")) for _ in range(2))
    assert eager.enable_packing()
    assert compiled.enable_packing()
    compiled.compile_backbone("eager")
    graphs = []
    with flash_attention_on_cpu() if operator else contextlib.nullcontext():
        for lengths in ((9, 4), (5, 7, 2), (3,) * 9, (40, 2), (2,) * 20):
            states, gradients = states_and_gradients(compiled, PackedSequence(lengths))
            expected_states, expected = states_and_gradients(eager, PackedSequence(lengths))
            torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)
            assert_same_gradients(gradients, expected, 1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1
    assert counters["recompile_limit"] == {}
    if operator:
        assert graphs[0] == 1
        assert counters["graph_break"] == {}
    else:
        assert all("_attend_by_document" in reason for reason in counters["graph_break"])


CONTEXT_PARALLEL_FAMILIES = ["LlamaConfig", "MistralConfig", "DeepseekV3Config"]


def compute_half(rank: int, folder: str) -> None:
    """Write this process's states and gradients with context parallelism over two processes."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = {}
    for family in CONTEXT_PARALLEL_FAMILIES:
        backbone = BackboneWithHead(make_model(family))
        assert backbone.enable_packing()
        for operator in (False, True):
            packed = PackedSequence(DOCUMENTS, distributed.group.WORLD, 2, rank)
            with flash_attention_on_cpu() if operator else contextlib.nullcontext() as kernels:
                states, gradients = states_and_gradients(backbone, packed)
            assert not operator or len(kernels.forward_calls) == 2
            results[family, operator] = states, {name: values.clone() for name, values in gradients.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> list[dict[tuple[str, bool], tuple[Tensor, dict[str, Tensor]]]]:
    folder: Path = tmp_path_factory.mktemp("halves")
    multiprocessing.spawn(compute_half, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("family", CONTEXT_PARALLEL_FAMILIES)
def test_context_parallel_processes_have_the_states_and_gradients_of_one(halves, family, operator):
    """Documents are split over processes; those of DeepSeek-V3 have values smaller than keys."""
    backbone = BackboneWithHead(make_model(family))
    assert backbone.enable_packing()
    expected_states, expected = states_and_gradients(backbone, PackedSequence(DOCUMENTS))
    results = [half[family, operator] for half in halves]
    for rank, (states, _) in enumerate(results):
        own = torch.from_numpy(PackedSequence(DOCUMENTS, None, 2, rank).token_indices(rank))
        torch.testing.assert_close(states, expected_states[:, own], rtol=1e-5, atol=1e-5)
    summed = {name: results[0][1][name] + results[1][1][name] for name in results[0][1]}
    assert_same_gradients(summed, expected)


def document_gradients(
    backbone: BackboneWithHead, rows: list[tuple[torch.Tensor, PackedSequence | None]]
) -> torch.Tensor:
    """Return all gradients of a weighted sum of the hidden states of rows, as one vector."""
    backbone.zero_grad()
    states = torch.cat([backbone(ids, packed) for ids, packed in rows], dim=1).float()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states * weights).sum().backward()
    return torch.cat([one.grad.flatten().float() for one in backbone.parameters() if one.grad is not None])


@pytest.mark.parametrize(
    ("family", "more"),
    [("LlamaConfig", {}), ("Qwen3Config", {}), ("MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 2})],
)
def test_bf16_model_packs_with_the_gradients_of_single_documents(family, more):
    # Eager attention rounds to bf16 elsewhere than xtk's, as kernels of a GPU do that depend on the number of rows.
    import transformers

    torch.manual_seed(0)
    configuration = getattr(transformers, family)(**{**FAMILIES[family][0], "hidden_size": 64, **more})
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32, attn_implementation="eager").eval()
    documents = [torch.randint(0, V, (1, length)) for length in (9, 1, 6, 20)]
    exact = document_gradients(BackboneWithHead(copy.deepcopy(model)), [(ids, None) for ids in documents])
    backbone = BackboneWithHead(model.bfloat16())
    single = document_gradients(backbone, [(ids, None) for ids in documents])
    assert backbone.enable_packing()
    assert backbone.supports_context_parallel
    packed = document_gradients(backbone, [(torch.cat(documents, dim=1), PackedSequence((9, 1, 6, 20)))])
    rounding = (single - exact).norm()
    assert (packed - single).norm() < 2 * rounding < 0.2 * exact.norm()


@pytest.mark.parametrize("family", [name for name, (_, attention) in FAMILIES.items() if attention == "a row each"])
def test_bf16_model_that_cannot_separate_documents_is_not_packed(family):
    backbone = BackboneWithHead(make_model(family).bfloat16())
    assert not backbone.enable_packing()


def test_layer_that_joins_documents_is_found_behind_others():
    configuration = {
        **LLAMA, "num_hidden_layers": 8, "layer_types": ["full_attention"] * 5 + ["linear_attention"] * 3,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    from transformers import Qwen3NextConfig

    assert not BackboneWithHead(AutoModelForCausalLM.from_config(Qwen3NextConfig(**configuration))).enable_packing()


def test_attention_with_a_window_that_the_masks_of_the_model_ignore_is_not_replaced():
    from transformers import OlmoeConfig

    torch.manual_seed(0)
    configuration = OlmoeConfig(**LLAMA, num_experts=4, num_experts_per_tok=2, eos_token_id=1, sliding_window=16)
    backbone = BackboneWithHead(AutoModelForCausalLM.from_config(configuration).eval())
    documents = [torch.randint(0, V, (1, length)) for length in (30, 20)]
    single_states = [backbone(ids) for ids in documents]
    assert backbone.enable_packing()
    packed_states = backbone(torch.cat(documents, dim=1), PackedSequence((30, 20)))
    torch.testing.assert_close(packed_states, torch.cat(single_states, dim=1), rtol=1e-5, atol=1e-5)


def make_large_model(kind: str, **options: object) -> torch.nn.Module:
    """Return a model without weights, with the sizes of published models."""
    from transformers import AutoConfig

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [("llama", 2), ("gemma3_text", 6), ("smollm3", 4), ("deepseek_v3", 4), ("jamba", 5), ("llama4_text", 4)],
)
def test_small_copy_has_a_layer_of_each_kind(kind, num_layers):
    model = make_large_model(kind)
    copied = small_copy(model, CPU)
    assert {one.dtype for one in copied.parameters()} == {torch.float32}
    kinds = [
        {
            tuple(f"{type(one).__name__} {getattr(one, 'sliding_window', 0) is None} {getattr(one, 'use_rope', 0)}"
                  for one in layer.modules())
            for layer in network.model.layers
        }
        for network in (model, copied)
    ]  # fmt: skip
    assert kinds[0] == kinds[1]
    assert len(copied.model.layers) == num_layers
    assert sum(one.numel() for one in copied.parameters()) < 0.05 * sum(one.numel() for one in model.parameters())


def register_attention(name: str, attend) -> list[torch.device]:
    """Register an attention implementation of transformers; return the devices of its calls."""
    devices: list[torch.device] = []

    def counted(module, query, *arguments, **options):
        devices.append(query.device)
        return attend(module, query, *arguments, **options)

    AttentionInterface.register(name, counted)
    AttentionMaskInterface.register(name, sdpa_mask)
    return devices


def attend_as_on_a_gpu_only(module, query, *arguments, **options):
    """Attend, for the training device and 16 bits alone; the meta device stands for the CPU next to a GPU."""
    if query.device.type == "meta" or query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports CUDA, fp16 and bf16")
    return sdpa_attention_forward(module, query, *arguments, **options)


def attend_to_all_documents(module, query, key, value, attention_mask, **options):
    return sdpa_attention_forward(module, query, key, value, None, **options)


def attend_in_16_bits_to_all_documents(module, query, key, value, attention_mask, **options):
    return attend_as_on_a_gpu_only(module, query, key, value, None, **options)


@pytest.mark.parametrize("name", ["eager", "sdpa", "bf16_only", "xtk"])
def test_attention_implementation_that_the_user_names_is_kept(name, capsys):
    devices = register_attention("bf16_only", attend_as_on_a_gpu_only)
    model = make_model("LlamaConfig")
    backbone = BackboneWithHead(model)
    assert backbone.enable_packing(name)
    assert model.config._attn_implementation == name
    assert capsys.readouterr().err == ""
    assert bool(devices) == (name == "bf16_only")


@pytest.mark.parametrize("attend", [attend_to_all_documents, attend_in_16_bits_to_all_documents])
def test_named_attention_that_joins_documents_is_replaced_with_a_note(attend, capsys):
    register_attention("joins_documents", attend)
    model = make_model("LlamaConfig")
    assert BackboneWithHead(model).enable_packing("joins_documents")
    assert model.config._attn_implementation == ATTENTION_NAME
    assert "joins_documents does not separate packed documents" in capsys.readouterr().err


def test_model_is_tested_on_the_training_device_before_it_has_weights():
    devices = register_attention("gpu_only", attend_as_on_a_gpu_only)
    model = make_large_model("cohere", **SIZES, intermediate_size=48, logit_scale=0.25)
    model.set_attn_implementation("gpu_only")
    backbone = BackboneWithHead(model, CPU)
    assert backbone.head.scale == 0.25
    assert backbone.enable_packing("gpu_only")
    assert model.config._attn_implementation == "gpu_only"
    assert set(devices) == {CPU}


def test_packing_test_leaves_the_random_generator_as_it_was():
    model, state = make_model("LlamaConfig"), torch.random.get_rng_state()
    assert BackboneWithHead(model).enable_packing()
    assert torch.equal(torch.random.get_rng_state(), state)
