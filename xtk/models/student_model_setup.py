"""The student model: loading for training with adapters, quantization and frozen parameters; saving."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtk import terminal
from xtk.errors import XtkError, require_package
from xtk.models.causal_lm import check_adapter, check_embedding_rows, load_causal_lm, loading_error
from xtk.models.deferred_weights import load_without_weights
from xtk.models.resolver import ModelRef
from xtk.models.saved_model import add_transformers_4_keys
from xtk.models.weight_validation import check_adapter_weights
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import SPEED, check_options, declared_options
from xtk.options.training_options import StudentModelOptions
from xtk.text.tokenizer import Tokenizer

# The dtypes of trainable weights. Small gradients underflow in fp16.
TRAINABLE_DTYPES = ("float32", "bfloat16")
ALL_LINEAR = ("all-linear",)
_HUB_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)$")


@dataclass(frozen=True, kw_only=True)
class StudentModelConfig(StudentModelOptions):
    """Options of loading the student and of its trainable parameters, named as in Hugging Face."""

    def __post_init__(self) -> None:
        if self.dtype not in TRAINABLE_DTYPES:
            raise unknown_name_error("training dtype", self.dtype, TRAINABLE_DTYPES)
        check_options(self)
        if self.load_in_4bit and self.load_in_8bit:
            raise XtkError("--load-in-4bit and --load-in-8bit exclude each other", hint="remove one of them")
        given = [name for name in self._non_default_options() if name.startswith("lora_") or name == "use_dora"]
        if given and not self.lora_r:
            option = given[0].replace("_", "-")
            raise XtkError(f"--{option} needs LoRA adapters, but --lora-r is 0", hint="add --lora-r 16")

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are quantized to 4 or 8 bits."""
        return self.load_in_4bit or self.load_in_8bit

    def _non_default_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        pairs = [(field, getattr(self, field.name)) for field in fields(self)]
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field, value in pairs
            if value != field.default
        }

    def identity_options(self) -> dict[str, Any]:
        """Return the non-default options that change the trained student, as JSON values."""
        speed = {field.name for field, declared in declared_options(type(self)) if declared.effect == SPEED}
        return {name: value for name, value in self._non_default_options().items() if name not in speed}


def load_student(
    source: ModelRef,
    config: StudentModelConfig,
    tokenizer: Tokenizer,
    *,
    checkpoint: Path | None = None,
    device: torch.device,
    mixed_precision: str = "no",
    quiet: bool = False,
) -> Any:
    """Return a model for training, in which only the trained parameters require gradients.

    Args:
        source: the student before training; its adapter is trained further.
        device: device of the model; meta: it is sharded before `read_model_shards` reads its weights, or it is loaded
            on the CPU where that is not possible (adapters, weights that transformers converts).
        checkpoint: folder written by `save_trainable`, from which the run resumes; None: a new run.
    """
    adapted = bool(config.lora_r or source.adapter)
    folder = source.folder if adapted or checkpoint is None else checkpoint
    base = replace(source, folder=folder, adapter=None, dtype=config.dtype)
    if device.type == "meta" and (adapted or config.is_quantized):
        device = torch.device("cpu")
    model = _load_base_model(base, config, device, mixed_precision)
    if not adapted and getattr(model, "quantization_method", None):
        raise XtkError(
            "the student's weights are quantized and cannot be trained",
            where=str(folder),
            hint="train LoRA adapters: add --lora-r 16",
        )
    check_embedding_rows(model, tokenizer)
    if adapted:
        model = attach_trainable_adapter(model, source, config, checkpoint)
    freeze_parameters(model, config.freeze)
    num_frozen = _freeze_other_modalities(model)
    if quiet:
        return model
    if num_frozen:
        terminal.note(f"distill: {num_frozen:,} parameters of images or sound get no gradient from text and are frozen")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.dtype == torch.bfloat16 for parameter in trained):
        terminal.note(
            "distill: warning: the trained weights are bf16, so updates below 1/256 of a weight are lost; "
            "use --dtype float32 --mixed-precision bf16 to keep them"
        )
    if adapted or config.identity_options():
        count, of = (sum(item.numel() for item in some) for some in (trained, model.parameters()))
        terminal.note(f"distill: {count:,} of {of:,} parameters are trained")
    return model


def _freeze_other_modalities(model: Any) -> int:
    """Freeze what text does not use in a model that also reads images or sound; return the number of parameters.

    Without gradients, data parallelism would wait for them.
    """
    inner = model.get_base_model() if is_peft_model(model) else model
    if inner.config.get_text_config() is inner.config:
        return 0
    parts = (inner.get_decoder(), inner.get_input_embeddings(), inner.get_output_embeddings())
    kept = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    others = [parameter for parameter in inner.parameters() if parameter.requires_grad and id(parameter) not in kept]
    for parameter in others:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in others)


def _load_base_model(base: ModelRef, config: StudentModelConfig, device: torch.device, mixed_precision: str) -> Any:
    """Return the base model with the configured attention and quantization."""
    options: dict[str, Any] = {}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    if config.is_quantized:
        require_package("bitsandbytes", "--load-in-4bit and --load-in-8bit need", extra="qlora")
        from transformers import BitsAndBytesConfig

        narrow = "bf16" in mixed_precision or config.dtype == "bfloat16"
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=config.load_in_4bit,
            load_in_8bit=config.load_in_8bit,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if narrow else torch.float32,
        )
        options["device_map"] = {"": device}
    if device.type == "meta":
        if (model := load_without_weights(base, options)) is not None:
            return model
        device = torch.device("cpu")
    try:
        return load_causal_lm(base, device=device, options=options)
    except XtkError as failure:
        if config.attn_implementation and re.search("attention|attn|kernel", failure.what, re.IGNORECASE):
            where = f"--attn-implementation {config.attn_implementation}, {base.folder}"
            raise XtkError(failure.what, where=where, hint="use --attn-implementation sdpa or eager") from failure
        raise


def attach_trainable_adapter(
    model: Any, source: ModelRef, config: StudentModelConfig, checkpoint: Path | None = None
) -> Any:
    """Return a peft model with a trainable adapter: from the checkpoint, from the student's adapter, or a new one."""
    require_package("peft", "LoRA adapters need")
    adapter_folder = checkpoint or source.adapter
    if source.adapter and config.lora_r:
        raise XtkError(
            "--lora-r does not apply: the student is a LoRA adapter already, and training continues this adapter",
            where=str(source.adapter),
            hint="remove the --lora options, or merge the adapter first with merge_and_unload of peft",
        )
    if source.adapter and not checkpoint:
        check_adapter(source.adapter)
    from peft import LoraConfig, PeftModel, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses deprecated functions of transformers
        if adapter_folder is not None:
            try:
                trained = PeftModel.from_pretrained(model, str(adapter_folder), is_trainable=True, torch_device="cpu")
                check_adapter_weights(trained, adapter_folder)
                return _set_base_model_name(trained, source.folder)
            except Exception as failure:
                raise loading_error(adapter_folder, failure) from failure
        targets = config.lora_target_modules
        _check_module_names(model, (*(() if targets == ALL_LINEAR else targets), *config.lora_modules_to_save))
        head = model.get_output_embeddings()
        is_tied = head is not None and head.weight is model.get_input_embeddings().weight
        tied = _embedding_names(model) if is_tied else set()
        if targets != ALL_LINEAR and set(targets) & tied:
            raise XtkError(
                "the student's embedding and output head share one weight, so neither can get a LoRA adapter",
                where=f"--lora-target-modules {','.join(targets)}",
                hint=f"remove {' and '.join(sorted(set(targets) & tied))} from --lora-target-modules; to train "
                f"both in full, use --lora-modules-to-save {min(tied)}",
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
            return _set_base_model_name(get_peft_model(model, described), source.folder)
        except ValueError as failure:
            raise XtkError(
                f"peft cannot add LoRA adapters with these options: {' '.join(str(failure).split())[:300]}",
                hint="change --lora-target-modules, --lora-modules-to-save or --use-dora",
            ) from failure


def _check_module_names(model: Any, suffixes: Sequence[str]) -> None:
    """Refuse names that are not a suffix of any module's name."""
    names = [name for name, _ in model.named_modules()]
    for suffix in suffixes:
        if not any(f".{name}".endswith(f".{suffix}") for name in names):
            raise unknown_name_error(
                "module of the student", suffix, {name.rpartition(".")[2] for name in names} - {""}
            )


def _embedding_names(model: Any) -> set[str]:
    """Return the last parts of the names of embedding and head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)}


def _set_base_model_name(model: Any, folder: Path) -> Any:
    """Set the adapter's base model to a hub id or an absolute path, which is valid wherever it is loaded."""
    match = _HUB_SNAPSHOT.search(folder.resolve().as_posix())
    described = model.peft_config[model.active_adapter]
    described.base_model_name_or_path = f"{match['owner']}/{match['name']}" if match else str(folder.resolve())
    described.revision = match["revision"] if match else None
    return model


def freeze_parameters(model: Any, patterns: Sequence[str]) -> None:
    """Exclude parameters whose names match a regular expression from training.

    Tied parameters have several names; a match of one freezes all.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        try:
            matching = [parameter for name, parameter in parameters if re.search(pattern, name)]
        except re.error as failure:
            raise XtkError(
                f"--freeze {pattern} is not a valid regular expression: {failure}",
                hint="use a part of a parameter's name, such as --freeze embed_tokens",
            ) from None
        if not matching:
            parts = {part for name, _ in parameters for part in name.split(".") if not part.isdigit()}
            raise unknown_name_error("parameter of the student", pattern, parts)
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise XtkError(
            "--freeze matches all parameters, so nothing would be trained",
            where="--freeze " + " --freeze ".join(patterns),
            hint="remove a pattern, or use a narrower one",
        )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in optimizer groups: matrices with weight decay; biases and norms without.

    As in the Hugging Face trainer, embeddings decay. Biases of mixture-of-experts layers, which are matrices, do not.
    """
    groups: dict[float, list[torch.nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
            groups[weight_decay if decays else 0.0].append(parameter)
    return [{"params": some, "weight_decay": decay} for decay, some in groups.items() if some]


def is_peft_model(model: Any) -> bool:
    """Return whether a model is a peft model around a transformers model."""
    return hasattr(model, "merge_and_unload") and hasattr(model, "peft_config")


def has_mergeable_adapter(model: Any) -> bool:
    """Return whether a model has adapters that can be merged: the weights are not quantized."""
    return is_peft_model(model) and not getattr(model.get_base_model(), "quantization_method", None)


def save_trainable(model: Any, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write what `load_student` reads: adapter or full model; `state_dict`: full weights by name, if sharded."""
    given = {} if state_dict is None else {"state_dict": dict(state_dict)}  # transformers empties this dict
    if not is_peft_model(model):
        model.save_pretrained(folder, safe_serialization=True, **given)
        add_transformers_4_keys(folder)
        return
    for configuration in model.peft_config.values():
        if isinstance(configuration.target_modules, set):  # in an order that differs between processes
            configuration.target_modules = sorted(configuration.target_modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Modules to save are named in the options; otherwise peft would query the hub for the original vocabulary size.
        model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False, **given)
    (folder / "README.md").unlink(missing_ok=True)  # peft's unfilled template


def save_final_student(model: Any, folder: Path) -> None:
    """Write the finished student; the model cannot be used afterwards.

    Adapters are merged into the model's weights, and also written to `adapter/`. Quantized weights cannot be
    merged without loss; for them only the adapter is written.
    """
    if not has_mergeable_adapter(model):
        save_trainable(model, folder)
        return
    (folder / "adapter").mkdir(parents=True)
    save_trainable(model, folder / "adapter")
    save_trainable(model.merge_and_unload(), folder)
