"""The arguments of transformers' Trainer, which LLaMA-Factory and TRL share, and Axolotl in part; its defaults.

Defaults are those of transformers 5. The tables also hold keys that two of the tools share.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.deepspeed import read_deepspeed_key
from stoker.job.importers.foreign_names import carry_optimizer, carry_schedule, drop_warmup_of_constant
from stoker.job.importers.fsdp import read_fsdp
from stoker.job.importers.offload import carry_activation_offload

EPOCH = "the steps of an epoch are known once the data is counted; `auto` is"
TRACKER = "metrics.jsonl is written; the trackers are TensorBoard, Weights & Biases and MLflow"
PROJECT = "huggingface"  # of Weights & Biases, by default
# Why a strategy of evaluations, and one of checkpoints, needs no line.
EVALUATES = {
    "steps": "held-out data is always evaluated at intervals of steps",
    "epoch": f"{EPOCH} a tenth of all",
    "": "`fraction: 0` says it",
}
SAVES = {
    "steps": "a checkpoint is always saved at intervals of steps",
    "epoch": f"{EPOCH} a fifth, at most 500",
    "": "Stoker always saves, or it could not go on",
}


@dataclass(frozen=True)
class TrainerDefaults:
    """A trainer's defaults, for keys that the tool's file omits."""

    lr: float = 5e-5
    recompute: bool = False
    precision: str = "fp32"


# Stoker always or never does this, or elsewhere: dropping the key loses nothing.
FREE = {
    "`stoker train` trains": "do_train do_eval do_predict prediction_loss_only",
    "every step is logged": "logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter "
    "log_level log_level_replica log_on_each_node disable_tqdm plot_loss include_num_input_tokens_seen "
    "include_tokens_per_second",
    TRACKER: "run_name project trackio_space_id trackio_bucket_id trackio_static_space_id push_to_hub hub_token "
    "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision use_swanlab swanlab_project",
    "the same command goes on where the run stopped": "resume_from_checkpoint ignore_data_skip "
    "restore_callback_states_from_checkpoint",
    "give each run its own `output`": "overwrite_output_dir",
    "a checkpoint is always whole, and written while training goes on": "save_only_model save_safetensors "
    "save_on_each_node enable_jit_checkpoint",
    "held-out sequences go through as training's do": "per_device_eval_batch_size eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics eval_on_start eval_delay "
    "bf16_full_eval fp16_full_eval",
    "Stoker tokenises ahead and in parallel by itself": "dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "dataloader_drop_last remove_unused_columns label_names dataset_num_proc pad_to_multiple_of",
    "the loss is always normalised by the tokens of the whole step": "average_tokens_across_devices",
    "processes are Stoker's or the launcher's to start": "local_rank ddp_backend ddp_timeout ddp_bucket_cap_mb "
    "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph accelerator_config use_cpu ray_run_name "
    "ray_num_workers resources_per_worker",
    "the model is built without memory": "low_cpu_mem_usage",
    "Stoker uses PyTorch's attention": "attn_implementation",
    "recomputation has no variants here": "gradient_checkpointing_kwargs activation_checkpointing_kwargs "
    "use_reentrant_gc",
    "the order, the weights and dropout all come from `seed`": "data_seed",
    "PyTorch decides": "tf32 torch_empty_cache_steps torch_compile_backend torch_compile_mode "
    "skip_memory_metrics debug use_cache greater_is_better",
    "Stoker's head and loss are chunked already": "use_liger_kernel liger_kernel_config enable_liger_kernel",
    "the plan says what fits": "auto_find_batch_size",
    "the lowest held-out loss is what `best` means": "metric_for_best_model",
}
# Keys without a counterpart: dropping one changes the training, unless it is switched off.
LOST = {
    "Stoker adds no noise to embeddings": "neftune_noise_alpha",
    "Stoker's loss has no label smoothing": "label_smoothing_factor",
    "under `tune: full`, write `train.float8` yourself": "fp8",
    "axes of the layout: give them in an Accelerate file": "parallelism_config parallelism_config.*",
    "Stoker trains all weights or an adapter's": "optim_target_modules",
    "PyTorch's defaults are used": "optim_args",
    "rows are shuffled, not grouped by length": "group_by_length train_sampling_strategy "
    "sortish_sampler length_column_name",
    "a schedule's arguments beyond its end": "lr_scheduler_kwargs.*",
    "Stoker does not stop early; `best` keeps the best": "early_stopping_steps early_stopping_patience",
}


def read_model(config: ConfigReader) -> None:
    """Reads which model is trained."""
    config.take("model_name_or_path", "model.name")
    if config.text("model_revision") == "main":
        config.drop("model_revision", "main is the default")
    else:
        config.take("model_revision", "model.revision")
    leave_trust(config)


def leave_trust(config: ConfigReader) -> None:
    """The option that allows a model's own code to run; the person who runs the job sets it, not the imported file."""
    trusted = config.flag("trust_remote_code") or False
    why = "add `model.trust_remote_code=true` if you trust the model" if trusted else "the default"
    config.drop("trust_remote_code", why, matters=trusted)


def read_trainer_arguments(config: ConfigReader, defaults: TrainerDefaults) -> None:
    """Reads every key of the trainer, with the tool's defaults for those that were not written."""
    lr = config.take("learning_rate", "train.lr", defaults.lr)
    config.take("per_device_train_batch_size", "train.micro_batch", 8)
    config.take("gradient_accumulation_steps", "train.accumulation", 1)
    if (config.whole("max_steps") or 0) <= 0:
        config.drop("max_steps", "-1 leaves the length to the epochs")
    carry_length(config, "num_train_epochs", 3.0)
    _schedule(config, lr or defaults.lr)
    read_optimizer(config, "optim")
    _precision(config, defaults.precision)
    old = config.value("eval_strategy") is None and config.value("evaluation_strategy") is not None
    key = "evaluation_strategy" if old else "eval_strategy"
    _interval(config, key, "eval_steps", "evaluate.every", None, EVALUATES)
    _interval(config, "save_strategy", "save_steps", "checkpoint.every", 500, SAVES)
    if config.value("save_total_limit") is None:
        why = "by default all checkpoints stay there, here the newest 2: `keep` says how many"
        config.leave("save_total_limit", why)
    elif config.whole("save_total_limit"):
        config.take("save_total_limit", "checkpoint.keep")
    config.take("load_best_model_at_end", "checkpoint.best", note="it is kept beside the newest")
    keys = ("gradient_checkpointing", "activation_checkpointing")
    recompute = next((key for key in keys if config.value(key) is not None), "")
    if recompute:
        config.carry(recompute, "parallel.recompute", "full" if config.flag(recompute) else "none")
    elif defaults.recompute:
        config.default("parallel.recompute", "full")
    carry_activation_offload(config, "activation_offloading")
    if config.flag("torch_compile"):
        config.carry("torch_compile", "train.compile", True)
    if config.flag("full_determinism"):
        config.carry("full_determinism", "train.deterministic", True)
    _trackers(config)
    config.take("output_dir", "output")
    read_deepspeed_key(config)
    read_fsdp(config)


def _trackers(config: ConfigReader) -> None:
    trackers = config.words("report_to")
    for name, value in (("tensorboard", True), ("wandb", PROJECT), ("mlflow", PROJECT)):
        if name in trackers:
            note = "the trainer's project, unless its environment names another" if value is not True else ""
            config.carry("report_to", f"train.{name}", value, note)
    if trackers and not config.handled("report_to"):
        config.drop("report_to", TRACKER)


def carry_length(config: ConfigReader, epochs: str, default: float) -> None:
    """Carries `max_steps` where it is positive, else the number of epochs at the key ``epochs``."""
    if (config.whole("max_steps") or 0) > 0:
        config.take("max_steps", "steps")
        config.idle("max_steps wins, there as here", epochs)
    else:
        config.take(epochs, "epochs", default)


def _schedule(config: ConfigReader, lr: float) -> None:
    carry_schedule(config, "lr_scheduler_type", lr=lr)
    if config.value("lr_scheduler_type") is None:
        config.default("train.schedule", "linear")
    steps, ratio = config.number("warmup_steps"), config.number("warmup_ratio")
    if drop_warmup_of_constant(config, "lr_scheduler_type"):
        return
    if steps or (steps is not None and ratio is None):
        config.carry("warmup_steps", "train.warmup", int(steps) if steps >= 1 else float(steps) or 0)
        config.drop("warmup_ratio", "warmup_steps wins, there as here")
    elif ratio is not None:
        config.carry("warmup_ratio", "train.warmup", float(ratio) or 0)
        config.drop("warmup_steps", "warmup_ratio says it")
    else:
        config.default("train.warmup", 0)


def read_optimizer(config: ConfigReader, key: str) -> None:
    """Reads the optimizer, named at ``key``, with its numbers, and the seed."""
    if carry_optimizer(config, key):
        _momentum(config)
    config.take_all(
        ("weight_decay", "train.weight_decay", 0.0),
        *([] if config.handled("adam_beta1") else [("adam_beta1", "train.beta1")]),
        ("adam_beta2", "train.beta2", 0.999),
        ("adam_epsilon", "train.eps"),
        ("max_grad_norm", "train.clip"),
        ("seed", "seed", 42),
    )


def _momentum(config: ConfigReader) -> None:
    """Reads the momentum of SGD, which is 0 unless ``optim_args`` gives it."""
    config.leave("adam_beta1", "SGD has no Adam decay")
    arguments = dict(word.split("=", 1) for word in config.words("optim_args") if "=" in word)
    try:
        momentum = float(arguments["momentum"])
    except (KeyError, ValueError):
        config.default("train.beta1", 0.0, "SGD without momentum")
    else:
        config.carry("optim_args", "train.beta1", momentum)


def _precision(config: ConfigReader, default: str) -> None:
    bf16, fp16 = config.flag("bf16"), config.flag("fp16")
    chosen = "bf16" if bf16 else "fp16" if fp16 else ""
    if chosen:
        config.carry(chosen, "train.precision", chosen)
    elif bf16 is not None:
        config.carry("bf16", "train.precision", "fp32", "neither bf16 nor fp16")
    else:
        config.default("train.precision", default)
    config.idle(f"off: {chosen} is on" if chosen else "off", "bf16", "fp16")


def _interval(
    config: ConfigReader, strategy_key: str, key: str, target: str, default: int | None, reasons: dict[str, str]
) -> None:
    """Carries the steps between evaluations or checkpoints, which the tool sets by a strategy and a number.

    Args:
        default: the steps if the file sets neither; None if the strategy is then "no".
        reasons: why a strategy needs no line; the empty one is for all others.
    """
    strategy = (config.text(strategy_key) or ("no" if default is None else "steps")).lower()
    strategy = "no" if strategy == "false" and default is None else strategy
    every, steps = config.number(key), config.whole("max_steps")
    if every is None and strategy == "steps" and default is not None:
        config.default(target, default)
    elif every is not None and strategy != "steps":
        config.drop(key, f"idle: {strategy_key} is {strategy}")
    elif every is not None and every >= 1:
        config.carry(key, target, int(every))
    elif every is not None and steps and steps > 0:
        config.carry(key, target, max(1, round(every * steps)), f"{every:g} of {steps} steps")
    else:
        config.drop(key, "a share of all steps, which are known once the data is counted; `auto` is one as well")
    config.drop(strategy_key, reasons.get(strategy, reasons[""]))
