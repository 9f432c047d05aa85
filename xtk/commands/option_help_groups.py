"""Headings under which `--help` lists the options of long commands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptionGroup:
    """Options under one heading.

    Attributes:
        title: the heading.
        options: names of parameters of the command, in the order in which they are listed.
        condition: the option without which these have no effect; each help text then begins with it. "": none.
    """

    title: str
    options: tuple[str, ...]
    condition: str = ""


NAMES = ("Python", "Jinja")  # first words that stay capitalized inside of a sentence; so do JSON, LoRA ...
OPTION_GROUPS = {
    "cache-teacher": (
        OptionGroup("Data", ("columns", "max_document_bytes", "weight_column", "route_column", "long_documents",
                             "max_length")),
        OptionGroup("Stored log-probabilities", ("support", "top_k", "top_p", "num_samples", "num_sample_sets", "seed",
                                                 "precision", "shard_tokens")),
        OptionGroup("Teacher", ("backend", "engine", "server", "concurrency", "dtype", "batch_tokens",
                                "trust_remote_code")),
        OptionGroup("Parallelism", ("num_processes", "num_machines", "machine_rank")),
        OptionGroup("Merge and estimate", ("merge", "rows", "estimate")),
    ),
    "rollout": (
        OptionGroup("Data", ("columns", "max_document_bytes", "weight_column", "route_column", "max_prompts",
                             "prompt_template", "apply_chat_template", "chat_template_kwargs")),
        OptionGroup("Sampling", ("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "stop",
                                 "seed", "top_logprobs")),
        OptionGroup("Rewards and environment", ("reward", "scale_rewards", "environment", "max_turns")),
        OptionGroup("Student", ("backend", "engine", "server", "concurrency", "dtype", "batch_tokens",
                                "trust_remote_code")),
    ),
    "distill": (
        OptionGroup("Data", ("columns", "max_document_bytes", "weight_column", "route_column", "long_documents",
                             "max_length", "packing", "dataloader_num_workers")),
        OptionGroup("Teacher", ("teacher", "teacher_block_steps", "offload_student", "combine_teachers",
                                "teacher_weights")),
        OptionGroup("Objective", ("loss", "projection", "scale_kd_to")),
        OptionGroup("Optimization", ("max_steps", "num_train_epochs", "per_device_train_batch_size",
                                     "gradient_accumulation_steps", "max_batch_tokens", "learning_rate",
                                     "lr_scheduler_type", "warmup_ratio", "warmup_steps", "min_lr_rate", "decay_ratio",
                                     "weight_decay", "max_grad_norm", "ema_decay", "max_skipped_steps",
                                     "mixed_precision", "gradient_checkpointing", "torch_compile", "seed")),
        OptionGroup("Student", ("dtype", "attn_implementation", "lora_r", "lora_alpha", "lora_dropout",
                                "lora_target_modules", "lora_modules_to_save", "use_dora", "load_in_4bit",
                                "load_in_8bit", "freeze", "resize_vocabulary", "trust_remote_code")),
        OptionGroup("On-policy generation", ("on_policy",)),
        OptionGroup("On-policy generation", ("prompt_template", "apply_chat_template", "chat_template_kwargs",
                                             "num_generations", "max_completion_length", "temperature", "top_p",
                                             "top_k", "stop", "steps_per_generation", "num_iterations", "lmbda",
                                             "reward", "reward_beta", "scale_rewards", "environment", "max_turns",
                                             "rollout_backend", "rollout_engine", "rollout_server", "rollout_dtype",
                                             "rollout_batch_tokens", "stop_if"), condition="--on-policy"),
        OptionGroup("Parallelism", ("num_processes", "parallel", "fsdp_offload", "devices", "num_machines",
                                    "machine_rank", "main_process_ip", "main_process_port", "ddp_timeout")),
        OptionGroup("Checkpoints and logging", ("save_steps", "save_total_limit", "max_seconds", "logging_steps",
                                                "report_to", "eval_data", "eval_tasks", "eval_steps", "eval_on_start",
                                                "early_stopping_patience")),
    ),
    "evaluate": (
        OptionGroup("Bits per byte", ("teacher", "by_category")),
        OptionGroup("Generated answers", ("reward",)),
        OptionGroup("Generated answers", ("num_generations", "temperature", "top_p", "top_k", "max_completion_length",
                                          "stop", "prompt_template", "backend", "engine"), condition="--reward"),
        OptionGroup("Tasks of lm-evaluation-harness", ("tasks",)),
        OptionGroup("Tasks of lm-evaluation-harness", ("include_path", "num_fewshot", "batch_size"),
                    condition="--tasks"),
        OptionGroup("Generated answers and tasks", ("max_prompts", "apply_chat_template", "chat_template_kwargs",
                                                    "seed", "output"), condition="--reward or --tasks"),
        OptionGroup("Model and data", ("compare_to", "columns", "max_document_bytes", "max_length", "dtype",
                                       "batch_tokens", "trust_remote_code")),
    ),
    "doctor": (
        OptionGroup("Data", ("columns", "max_document_bytes", "long_documents", "max_length")),
        OptionGroup("Planned cache", ("teacher_dtype", "top_k", "batch_tokens", "tokens_per_second")),
        OptionGroup("Planned training run", ("output", "num_processes", "parallel", "per_device_train_batch_size",
                                             "gradient_accumulation_steps", "max_batch_tokens", "dtype",
                                             "mixed_precision", "gradient_checkpointing", "attn_implementation",
                                             "lora_r", "lora_target_modules", "ema_decay", "save_total_limit")),
    ),
}  # fmt: skip


def add_condition(help_text: str, condition: str) -> str:
    """Return a help text that begins with the option that it depends on: `With --on-policy: sampling temperature.`."""
    first_word = help_text.split(maxsplit=1)[0]
    is_name = first_word in NAMES or any(letter.isupper() or letter.isdigit() for letter in first_word[1:])
    return f"With {condition}: {help_text if is_name else help_text[0].lower() + help_text[1:]}"
