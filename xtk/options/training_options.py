"""Options of `xtk distill` that configurations of the training inherit."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.options.declaration import INPUTS, REPORTING, SPEED, option
from xtk.options.shared import MAX_GENERATIONS, MAX_SEED


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """How documents become sequences of tokens."""

    long_documents: str = option(
        "refuse",
        "Handling of documents longer than --max-length or the context: refuse the run, truncate or skip.",
        choices=("refuse", "truncate", "skip"),
        effect=INPUTS,
    )
    max_length: int = option(
        0,
        "Maximum number of tokens per document; --long-documents handles longer ones. 0: the context length.",
        min=0,
        effect=INPUTS,
    )
    packing: bool = option(
        True,
        "Pack documents into rows without padding, if the model supports it; attention is per document.",
        effect=SPEED,
    )


@dataclass(frozen=True, kw_only=True)
class RegionOptions:
    """Which parts of conversations are trained."""

    train_on: tuple[str, ...] = option(
        ("answer", "reasoning", "reasoning-end", "tool-call", "end-of-turn", "markup"),
        "Parts of assistant messages that are trained, separated by commas. markup (other text of the chat template) "
        "is trained by losses without a teacher, such as ce, only.",
        metavar="REGION,...",
        comma_separated=True,
        identity_if_set=True,
    )
    region_weights: str = option(
        "",
        "Weights of these regions in the loss, such as reasoning=0.5; 1 for others.",
        metavar="REGION=W,...",
        identity_if_set=True,
    )
    advantage_clip: str = option(
        "",
        "Bounds of the policy-gradient advantage in regions, in nats, such as reasoning-end=1.",
        metavar="REGION=NATS,...",
        identity_if_set=True,
    )


@dataclass(frozen=True, kw_only=True)
class TeacherUseOptions:
    """When teachers score, and how several are combined."""

    teacher_block_steps: int = option(
        0,
        "With --teacher: optimizer steps whose data the teacher scores at once, before training on it. 0: "
        "automatic (64, or what fits in 4 GiB).",
        min=0,
        effect=SPEED,
    )
    offload_student: bool = option(
        False, "With --teacher: move student and optimizer to CPU memory while the teacher scores.", effect=SPEED
    )
    combine_teachers: str = option(
        "sum",
        "Combination of several teachers: sum of losses, mixture of probabilities, select or route. select: per "
        "document, the teacher with the lowest CE per byte; route: the one in --route-column.",
        metavar="[sum|mixture|select|route]",
        effect=INPUTS,
        identity_if_set=True,
    )
    teacher_shift: bool = option(
        False,
        "With --reference: target = initial student x teacher / reference, over the cells of each loss.",
        identity_if_set=True,
    )
    teacher_weights: str = option(
        "",
        "Weights of the teachers, such as 0.7,0.3 (default: equal); or computed from what they predict. "
        "ce:alpha=5,per=document favors a low CE of the text; docs/how-to/several-teachers.md lists all.",
        metavar="W,W...|SCORE[:KEY=VALUE,...]",
        identity_if_set=True,
    )
    scale_kd_to: str = option(
        "none",
        "ce: scale the sum of distillation losses to the value of --loss ce at every step; a third slower.",
        choices=("none", "ce"),
        identity_if_set=True,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Steps, batches, optimizer and precision."""

    max_steps: int = option(0, "Number of optimizer steps; 0: given by --num-train-epochs.", min=0)
    num_train_epochs: float = option(1.0, "Number of passes over the training documents.", min=0, max=1e6)
    per_device_train_batch_size: int = option(8, "Documents per forward pass and process.", min=1, effect=SPEED)
    gradient_accumulation_steps: int = option(1, "Forward passes per optimizer step and process.", min=1, effect=SPEED)
    max_batch_tokens: int | None = option(
        None,
        "Maximum tokens of a forward pass; a larger batch is split into several. Default: 16384 on a GPU, 0 (no "
        "limit) on a CPU.",
        min=0,
        effect=SPEED,
        show_default=False,
    )
    learning_rate: float = option(
        5e-05, "AdamW learning rate at the end of the warm-up; 0: weights do not change.", min=0
    )
    lr_scheduler_type: str = option(
        "cosine",
        "Learning rate schedule after the warm-up. warmup_stable_decay: constant, then a decay over the last "
        "--decay-ratio of the steps.",
        metavar="[cosine|linear|constant|cosine_with_min_lr|inverse_sqrt|warmup_stable_decay]",
    )
    warmup_ratio: float = option(0.05, "Fraction of the steps with a rising learning rate (warm-up).", min=0, max=1)
    warmup_steps: int = option(
        0, "Number of warm-up steps, instead of --warmup-ratio; 0: use the ratio.", min=0, identity_if_set=True
    )
    min_lr_rate: float = option(
        0.1,
        "With --lr-scheduler-type cosine_with_min_lr: final fraction of --learning-rate.",
        min=0,
        max=1,
        identity_if_set=True,
    )
    decay_ratio: float = option(
        0.1,
        "With --lr-scheduler-type warmup_stable_decay: fraction of the steps in the final decay.",
        min=0,
        max=1,
        identity_if_set=True,
    )
    weight_decay: float = option(0.0, "AdamW weight decay of matrices; biases and norms have none.", min=0)
    max_grad_norm: float = option(1.0, "Maximum gradient norm (clipping); 0: no clipping.", min=0)
    ema_decay: float = option(
        0.0,
        "Decay of an exponential moving average of the weights, saved as the student; 0: none. 0.999 averages "
        "about the last 1000 steps, in float32.",
        min=0,
        below=1,
        identity_if_set=True,
    )
    mixed_precision: str = option(
        "auto",
        "bf16: activations in bf16, weights and losses in float32; no: all in float32. auto: bf16 on a GPU "
        "that has it.",
        choices=("auto", "no", "bf16"),
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass: less memory, about a third slower.", effect=SPEED
    )
    seed: int = option(
        42, "Random seed of document order, dropout, LoRA initialization and rollouts.", min=0, max=MAX_SEED
    )
    early_stopping_patience: int = option(
        0,
        "Evaluations without lower bits per byte after which the run ends; 0: no early stopping. The student then "
        "has the weights of the best evaluation.",
        min=0,
        identity_if_set=True,
    )


@dataclass(frozen=True, kw_only=True)
class StudentModelOptions:
    """How the student is loaded, and which weights are trained."""

    dtype: str = option(
        "float32",
        "Data type of the weights in memory; computation: --mixed-precision. bfloat16 needs half the memory, but "
        "loses small updates of trained weights.",
        metavar="[float32|bfloat16]",
    )
    attn_implementation: str = option(
        "",
        "Attention implementation: sdpa, eager, flash_attention_2 or a hub kernel. Default: chosen by transformers.",
        metavar="NAME",
        effect=SPEED,
    )
    torch_compile: bool = option(
        False, "Compile the model with torch.compile: about a minute at the start, then faster steps.", effect=SPEED
    )
    lora_r: int = option(0, "LoRA rank; 0: train the full model.", min=0)
    lora_alpha: int = option(0, "LoRA alpha: adapters are scaled by alpha / rank; 0: scaled by 2.", min=0)
    lora_dropout: float = option(0.0, "Dropout probability of LoRA adapter inputs.", min=0, below=1)
    lora_target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Modules with LoRA adapters, by the end of their names, such as q_proj,v_proj.",
        metavar="NAME,...",
        comma_separated=True,
    )
    lora_modules_to_save: tuple[str, ...] = option(
        (),
        "Modules trained in full besides the LoRA adapters, such as embed_tokens,lm_head.",
        metavar="NAME,...",
        comma_separated=True,
    )
    use_dora: bool = option(False, "DoRA: LoRA with trained column magnitudes.")
    load_in_4bit: bool = option(
        False, "QLoRA: load the student's frozen weights in 4-bit NF4 (bitsandbytes); needs --lora-r."
    )
    load_in_8bit: bool = option(False, "Load the student's frozen weights in int8 (bitsandbytes); needs --lora-r.")
    freeze: tuple[str, ...] = option(
        (),
        "Parameters that are not trained, by a part of their name or a regular expression. Repeatable.",
        metavar="PATTERN",
    )


@dataclass(frozen=True, kw_only=True)
class OnPolicyOptions:
    """How completions become training steps."""

    num_generations: int = option(
        1, "Rollouts per prompt, in one optimizer step; each is a document of the batch.", min=1, max=MAX_GENERATIONS
    )
    steps_per_generation: int = option(
        1, "Optimizer steps per batch of rollouts, which one version of the weights generates.", min=1
    )
    num_iterations: int = option(
        1, "Optimizer passes over each batch of rollouts (mu in GRPO). Above 1: cheaper, less on-policy.", min=1
    )
    lmbda: float = option(
        1.0, "Fraction of steps on sampled completions; other steps use completions of the data.", min=0, max=1
    )
    reward_beta: float = option(
        0.0, "Weight the losses of a prompt's rollouts by softmax(reward / beta); 0: equally.", min=0
    )


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """How a model is distributed over processes."""

    parallel: str = option(
        "",
        "Processes by kind of parallelism: fsdp=N, tp=N (tensor), cp=N (context), dp=N (data). fsdp=2,tp=4 needs 8 "
        "processes; dp takes the processes that are left.",
        metavar="NAME=N,...",
        effect=SPEED,
    )
    fsdp_offload: bool = option(
        False, "With --parallel fsdp=N or tp=N: keep weights and optimizer in CPU memory.", effect=SPEED
    )


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """Checkpoints, metrics, evaluations and processes, which do not change the student."""

    save_steps: int = option(500, "Steps between two checkpoints; 0: no checkpoints.", min=0, effect=REPORTING)
    save_total_limit: int = option(
        2, "Maximum number of checkpoints kept; older ones are deleted.", min=1, effect=REPORTING
    )
    logging_steps: int = option(10, "Steps between two lines of metrics.jsonl.", min=1, effect=REPORTING)
    eval_steps: int = option(0, "Steps between two evaluations; 0: only at the end.", min=0)
    eval_on_start: bool = option(False, "Evaluate before the first step, too.", effect=REPORTING)
    dataloader_num_workers: int | None = option(
        None,
        "Processes that tokenize, align and decode ahead, for each process of the run; 0: a thread does. Default: on a "
        "GPU up to 4, as the CPU cores allow; 0 on a CPU, with --teacher and on-policy.",
        min=0,
        max=256,
        effect=REPORTING,
        show_default=False,
    )
    max_skipped_steps: int = option(
        10, "Maximum number of consecutive steps skipped for a non-finite loss or gradient; more end the run.", min=0
    )
    ddp_timeout: int = option(
        600, "Seconds that a process waits for the others before the run fails.", min=1, effect=REPORTING
    )
