"""What becomes of a student's model before it is trained: adapters, packed weights, frozen parts; how it is kept."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtk import terminal
from xtk.errors import XtkError
from xtk.models.causal_lm import DTYPES, check_adapter, check_embedding_rows, load_causal_lm, loading_error
from xtk.models.weight_validation import check_adapter_weights
from xtk.registry import unknown_name_error
from xtk.tokens.tokenizer import Tokenizer

# The dtypes that weights can be trained in: fp16 has no room for small gradients.
TRAINABLE_DTYPES = ("float32", "bfloat16")
ALL_LINEAR = ("all-linear",)
# Rows of a resized vocabulary come in such numbers, which tensor cores and vocabulary shards like.
VOCABULARY_MULTIPLE = 64
# How the same numbers are computed; what a run gives does not depend on it.
EXECUTION_OPTIONS = ("attn_implementation", "torch_compile")
_HUB_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)$")


@dataclass(frozen=True)
class StudentModelConfig:
    """How a student's model is loaded and what of it is trained, in the words of Hugging Face.

    Attributes:
        dtype: in which weights are held, and trained if they are.
        attn_implementation: transformers' name of how attention is computed; "": what transformers takes.
        torch_compile: compile the model's body.
        load_in_4bit: pack the matrices into NF4, their scales packed again (QLoRA); they cannot be trained.
        load_in_8bit: pack the matrices into int8; they cannot be trained.
        lora_r: rank of the LoRA adapters, which are trained instead of the matrices; 0: no adapters.
        lora_alpha: adapters are multiplied by `lora_alpha / lora_r`; 0: twice `lora_r`.
        lora_dropout: of what goes into adapters.
        lora_target_modules: ends of the names of modules that get adapters; "all-linear": all but the head.
        lora_modules_to_save: ends of the names of modules that are trained whole beside them.
        use_dora: adapters of directions, with the lengths of columns trained beside them.
        freeze: regular expressions; parameters whose names hold one of them stay as they are.
        resize_vocabulary: add embedding rows for tokens that have none.

    Raises:
        XtkError: a value that is not known, or options that say nothing together.
    """

    dtype: str = "float32"
    attn_implementation: str = ""
    torch_compile: bool = False
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    lora_r: int = 0
    lora_alpha: int = 0
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ALL_LINEAR
    lora_modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    freeze: tuple[str, ...] = ()
    resize_vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in TRAINABLE_DTYPES:
            raise unknown_name_error("dtype to train in", self.dtype, TRAINABLE_DTYPES)
        if self.load_in_4bit and self.load_in_8bit:
            raise XtkError("--load-in-4bit and --load-in-8bit do not go together")
        if self.lora_r < 0:
            raise XtkError(f"--lora-r is {self.lora_r}; it is a rank, 1 or more, or 0 for no adapters")
        if not 0 <= self.lora_dropout < 1:
            raise XtkError(f"--lora-dropout is {self.lora_dropout}; it is a number from 0 to less than 1")
        if self.lora_alpha < 0:
            raise XtkError(f"--lora-alpha is {self.lora_alpha}; it is a number above 0, or 0 for twice --lora-r")
        given = [name for name in self._non_default_options() if name.startswith("lora_") or name == "use_dora"]
        if given and not self.lora_r:
            option = given[0].replace("_", "-")
            raise XtkError(f"--{option} says how adapters are made, and there are none", hint="--lora-r 16")
        if self.resize_vocabulary and self.is_quantized:
            raise XtkError(
                "a vocabulary is not resized over packed weights: its new rows could not be kept with the adapter",
                hint="resize it before: model.resize_token_embeddings(len(tokenizer)), save_pretrained",
            )

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are packed into fewer bits."""
        return self.load_in_4bit or self.load_in_8bit

    def _non_default_options(self) -> dict[str, Any]:
        """Return what is not as usual."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def identity_options(self) -> dict[str, Any]:
        """Return what changes the student, as far as it is not as usual; JSON."""
        return {name: value for name, value in self._non_default_options().items() if name not in EXECUTION_OPTIONS}


@dataclass(frozen=True)
class StudentSource:
    """Where a student's weights come from.

    Attributes:
        model: a folder with configuration and weights.
        adapter: a folder of peft's, of an adapter of this model that is trained on; None: there is none.
        checkpoint: what `save_trainable` wrote in this run, from which it goes on; None: it begins.
    """

    model: Path
    adapter: Path | None = None
    checkpoint: Path | None = None


def load_student(
    source: StudentSource,
    config: StudentModelConfig,
    tokenizer: Tokenizer,
    *,
    device: torch.device,
    mixed_precision: str = "no",
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Any:
    """Load a model for training: only what is to be trained asks for gradients.

    Args:
        source: of its weights.
        config: what is done with it.
        tokenizer: the student's, whose tokens need rows.
        device: where it goes.
        mixed_precision: "bf16" if the model will compute in it.
        trust_remote_code: run the model's own Python code.
        options: more arguments of `from_pretrained`.
        quiet: tell nothing.

    Returns:
        A model of transformers, or peft's around it.

    Raises:
        XtkError: it cannot be loaded, or not in this way.
    """
    adapted = bool(config.lora_r or source.adapter)
    whole = source.model if adapted or source.checkpoint is None else source.checkpoint
    model = _load_base_model(whole, config, device, mixed_precision, trust_remote_code, dict(options or {}))
    if not adapted and getattr(model, "quantization_method", None):
        raise XtkError(
            "packed weights cannot be trained", where=str(whole), hint="train adapters over them: --lora-r 16"
        )
    if config.resize_vocabulary:
        _resize_vocabulary(model, tokenizer, config, adapted)
    check_embedding_rows(model, tokenizer)
    if adapted:
        model = attach_trainable_adapter(model, source, config)
    freeze_parameters(model, config.freeze)
    if quiet:
        return model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        terminal.note(
            "distill: weights are trained in bf16: updates smaller than a 256th of a weight are lost "
            "(--dtype float32 --mixed-precision bf16 keeps them)"
        )
    if adapted or config.identity_options():
        count, of = (sum(one.numel() for one in some) for some in (trained, model.parameters()))
        terminal.note(f"distill: {count:,} of {of:,} numbers of the model are trained")
    return model


def _load_base_model(
    folder: Path,
    preparation: StudentModelConfig,
    device: torch.device,
    mixed_precision: str,
    trust_remote_code: bool,
    options: dict[str, Any],
) -> Any:
    """Load the model itself, with the attention and the packing that are asked for."""
    if preparation.attn_implementation:
        options["attn_implementation"] = preparation.attn_implementation
    if preparation.is_quantized:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise XtkError("--load-in-4bit and --load-in-8bit need bitsandbytes", hint="pip install 'xtk[qlora]'")
        from transformers import BitsAndBytesConfig

        narrow = "bf16" in mixed_precision or preparation.dtype == "bfloat16"
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=preparation.load_in_4bit,
            load_in_8bit=preparation.load_in_8bit,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if narrow else torch.float32,
        )
        options.setdefault("device_map", {"": device})
    try:
        return load_causal_lm(
            folder,
            dtype=DTYPES[preparation.dtype],
            device=device,
            trust_remote_code=trust_remote_code,
            options=options,
        )
    except XtkError as wrong:
        if preparation.attn_implementation and re.search("attention|attn|kernel", wrong.what, re.IGNORECASE):
            where = f"--attn-implementation {preparation.attn_implementation}, {folder}"
            raise XtkError(wrong.what, where=where, hint="sdpa and eager are there without more") from wrong
        raise


def _resize_vocabulary(model: Any, tokenizer: Tokenizer, preparation: StudentModelConfig, adapted: bool) -> None:
    """Add embedding rows for tokens that have none, around the mean of those that are there."""
    rows = model.get_input_embeddings().weight.shape[0]
    if rows >= len(tokenizer):
        return
    ends = {
        name.rpartition(".")[2]: name
        for name, module in model.named_modules()
        if module is model.get_input_embeddings() or module is model.get_output_embeddings()
    }
    whole = {one.rpartition(".")[2] for one in preparation.lora_modules_to_save}
    if adapted and not set(ends) <= whole:
        raise XtkError(
            "adapters leave new rows of the vocabulary untrained",
            where=f"{rows:,} rows for {len(tokenizer):,} tokens",
            hint=f"--lora-modules-to-save {','.join(ends)} trains the embeddings whole",
        )
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=VOCABULARY_MULTIPLE)
    terminal.note(f"distill: the vocabulary has {model.get_input_embeddings().weight.shape[0]:,} rows, {rows:,} before")


def attach_trainable_adapter(model: Any, source: StudentSource, config: StudentModelConfig) -> Any:
    """Put an adapter into a model: that of the checkpoint, the one that the student came with, or a new one.

    Raises:
        XtkError: peft is not there, the adapter cannot be read, or modules that are not there were named.
    """
    if importlib.util.find_spec("peft") is None:
        raise XtkError("adapters need peft", hint="pip install 'xtk[peft]'")
    found = source.checkpoint or source.adapter
    if source.adapter and config.lora_r:
        raise XtkError(
            "the student is an adapter already, which is trained on as it is",
            where=str(source.adapter),
            hint="leave the options of LoRA out, or merge it into its model (peft: merge_and_unload), and begin there",
        )
    if source.adapter and not source.checkpoint:
        check_adapter(source.adapter)
    from peft import LoraConfig, PeftModel, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers in a way that it will not know for long
        if found is not None:
            try:
                trained = PeftModel.from_pretrained(model, str(found), is_trainable=True)
                check_adapter_weights(trained, found)
                return _set_base_model_name(trained, source.model)
            except Exception as wrong:
                raise loading_error(found, wrong) from wrong
        names = [name for name, _ in model.named_modules()]
        targets = config.lora_target_modules
        for asked in (() if targets == ALL_LINEAR else targets, config.lora_modules_to_save):
            _check_module_names(names, asked)
        tied = _tied_embedding_names(model)
        if targets != ALL_LINEAR and set(targets) & tied:
            raise XtkError(
                "embedding and head are one matrix in this model, and an adapter is of one of them",
                where=f"--lora-target-modules {','.join(targets)}",
                hint=f"--lora-modules-to-save {min(tied)}, which trains both whole",
            )
        described = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora_r,
            lora_alpha=config.lora_alpha or 2 * config.lora_r,
            lora_dropout=config.lora_dropout,
            target_modules=ALL_LINEAR[0] if targets == ALL_LINEAR else list(targets),
            modules_to_save=list(config.lora_modules_to_save) or None,
            use_dora=config.use_dora,
            ensure_weight_tying=bool(tied),
        )
        try:
            return _set_base_model_name(get_peft_model(model, described), source.model)
        except ValueError as wrong:
            raise XtkError(f"peft makes no such adapter: {' '.join(str(wrong).split())[:300]}") from wrong


def _check_module_names(names: Sequence[str], asked: Sequence[str]) -> None:
    """Refuse a module that no name ends in."""
    for one in asked:
        if not any(name == one or name.endswith(f".{one}") for name in names):
            raise unknown_name_error("module", one, {name.rpartition(".")[2] for name in names} - {""})


def _tied_embedding_names(model: Any) -> set[str]:
    """Return the last parts of the names of embedding and head, where they are one matrix; else none."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if ends[1] is None or ends[0].weight is not ends[1].weight:
        return set()
    return {name.rpartition(".")[2] for name, module in model.named_modules() if module in ends}


def _set_base_model_name(model: Any, folder: Path) -> Any:
    """Let the adapter tell which model it belongs to, wherever it is read: a hub id, or an absolute path."""
    found = _HUB_SNAPSHOT.search(folder.resolve().as_posix())
    described = model.peft_config[model.active_adapter]
    described.base_model_name_or_path = f"{found['owner']}/{found['name']}" if found else str(folder.resolve())
    described.revision = found["revision"] if found else None
    return model


def freeze_parameters(model: Any, patterns: Sequence[str]) -> None:
    """Let parameters whose names hold one of some regular expressions stay as they are.

    Tied parameters have several names, each of which holds for all.

    Raises:
        XtkError: a pattern that no name holds; or nothing is left to train.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        try:
            found = [parameter for name, parameter in parameters if re.search(pattern, name)]
        except re.error as wrong:
            raise XtkError(f"--freeze {pattern} is no regular expression: {wrong}") from None
        if not found:
            parts = {part for name, _ in parameters for part in name.split(".") if not part.isdigit()}
            raise unknown_name_error("parameter", pattern, parts)
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise XtkError("nothing is left to train", where="--freeze " + " --freeze ".join(patterns))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in groups for an optimizer: matrices decay; biases and norms do not.

    As in Hugging Face's trainer, embeddings decay. The biases of a mixture's experts are a matrix, and are biases.
    """
    groups: dict[float, list[torch.nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
            groups[weight_decay if decays else 0.0].append(parameter)
    return [{"params": some, "weight_decay": decay} for decay, some in groups.items() if some]


def is_peft_model(model: Any) -> bool:
    """Whether a model is peft's around one of transformers."""
    return hasattr(model, "merge_and_unload") and hasattr(model, "peft_config")


def has_mergeable_adapter(model: Any) -> bool:
    """Whether a model has adapters that its weights can take up: packed ones cannot."""
    return is_peft_model(model) and not getattr(model.get_base_model(), "quantization_method", None)


def save_trainable(model: Any, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write what training changes, for `load_student` to go on from: the adapter alone, or the whole model.

    Args:
        model: of transformers, or peft's around it.
        folder: which is there.
        state_dict: by the model's names of them, if its own are cut over processes; None: its own.
    """
    given = {} if state_dict is None else {"state_dict": dict(state_dict)}  # transformers empties what it is given
    if not is_peft_model(model):
        model.save_pretrained(folder, safe_serialization=True, **given)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What is saved beside the adapters was named; peft would ask the hub whether the vocabulary was resized.
        model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False, **given)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form, with its blanks


def save_final_student(model: Any, folder: Path) -> None:
    """Write the finished student, the last thing that is done with the model.

    Adapters are merged into the model's weights, and kept beside them in `adapter/`. Over packed weights, to which
    nothing can be added without a loss, the adapter is all that is written.
    """
    if not has_mergeable_adapter(model):
        save_trainable(model, folder)
        return
    (folder / "adapter").mkdir(parents=True)
    save_trainable(model, folder / "adapter")
    save_trainable(model.merge_and_unload(), folder)
