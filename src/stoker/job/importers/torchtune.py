"""torchtune's YAML: blocks whose ``_component_`` names the class or function to build; its arguments are the other
keys.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_names import carry_betas, carry_optimizer, task_not_carried
from stoker.job.importers.offload import carry_activation_offload
from stoker.job.importers.torchtune_data import COMPONENT, read_sources

FREE = {
    "the model folder says its kind, its files and its tokenizer": "tokenizer._component_ tokenizer.path "
    "tokenizer.merges_file tokenizer.vocab_file tokenizer.tokenizer_json_path tokenizer.tokenizer_config_json_path "
    "tokenizer.generation_config_path checkpointer.*",
    "every step is logged": "metric_logger.* log_every_n_steps log_peak_memory_stats log_level",
    "Stoker measures every run by itself": "profiler.*",
    "the device is what there is": "device dataset_num_workers num_workers dataloader.* seed_dataset",
    "the same command goes on where the run stopped": "resume_from_checkpoint",
    "a checkpoint is always whole, and written while training goes on": "save_adapter_weights_only "
    "enable_async_checkpointing save_last_epoch_only epochs_to_save",
    "Stoker's head and loss are chunked already": "loss.*",
    "Stoker shards block by block, always": "custom_sharded_layers use_loss_parallel_ctx_manager",
    "rows are always shuffled": "shuffle",
    "held-out sequences go through as training's do": "batch_size_val",
    "PyTorch decides": "optimizer.fused optimizer.foreach cudnn_deterministic_mode",
    "names of this file alone": "model_type model_name checkpoint_dir dtype_val",
    "the step is one": "optimizer.amsgrad",
}
LOST = {
    "the model folder's tokenizer says them": "tokenizer.special_tokens_path tokenizer.*",
    "the step is taken after the whole backward pass: more memory, the same result": "optimizer_in_bwd",
    "Stoker trains in bf16, fp16 or fp32": "quantizer.*",
    "under `tune: full`, write `train.float8` yourself": "enable_fp8_training fp8_recipe_name",
    "one rate for all": "lr_scheduler.num_cycles",
    "an optimizer's argument that Stoker does not have": "optimizer.*",
    "a schedule's argument that Stoker does not have": "lr_scheduler.*",
    "a model's argument that Stoker does not have": "model.*",
}
ATTENTION = {"output_proj": "o_proj"}
MLP = ["gate_proj", "up_proj", "down_proj"]
DISTRIBUTED = (
    "data_parallel_shard_dim", "data_parallel_replicate_dim", "tensor_parallel_dim", "context_parallel_dim",
    "fsdp_cpu_offload", "fsdp_reshard_after_forward", "custom_sharded_layers", "tensor_parallel_plan",
)  # fmt: skip


def read_torchtune(document: JobDocument) -> ConfigReader:
    """Reads a training file of torchtune. ``${key}`` is replaced by another key's value."""
    config = ConfigReader(replace(document, data=_resolved(document.data, document.data)), "torchtune")
    formats = read_sources(config)
    mode = config.text("tokenizer.truncation_type")
    config.drop("tokenizer.truncation_type", "a row keeps its beginning", matters=mode != "right")
    _task(config, formats)
    _model(config)
    _training(config)
    _optimizer(config)
    _layout(config)
    config.take("output_dir", "output")
    if "TensorBoard" in str(config.value(("metric_logger", COMPONENT))):
        config.carry(("metric_logger", COMPONENT), "train.tensorboard", True)
    config.sweep([FREE], [LOST])
    return config


def _resolved(value: Any, root: dict[str, Any], depth: int = 0) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(inner, root, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, root, depth) for inner in value]
    if not isinstance(value, str) or "${" not in value or depth > 4:
        return value
    return _resolved(re.sub(r"\$\{([\w.]+)\}", lambda name: _at(root, name), value), root, depth + 1)


def _at(root: dict[str, Any], name: re.Match[str]) -> str:
    value: Any = root
    for part in name[1].split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return name[0] if value is None or isinstance(value, dict | list) else str(value)


def _task(config: ConfigReader, formats: list[str]) -> None:
    loss = str(config.value(("loss", COMPONENT)) or "")
    for key, word, found in (
        ("loss", "dpo", "DPO" in loss or "RSO" in loss or "SimPO" in loss),
        ("teacher_model", "kd", config.value("teacher_model") is not None),
        ("policy_model", "ppo", config.value("policy_model") is not None),
        ("reward_model", "ppo", config.value("reward_model") is not None),
        ("loss", "grpo", "GRPO" in loss),
        ("dataset", "dpo", "preference" in formats),
    ):
        if found:
            task_not_carried(config, key, word)
            return
    config.default("task", "pretrain" if set(formats) == {"text"} else "sft", "by the data set's builder")


def _model(config: ConfigReader) -> None:
    config.take("checkpointer.checkpoint_dir", "model.name")
    path, component = ("model", COMPONENT), str(config.value(("model", COMPONENT)) or "")
    name = component.rsplit(".", maxsplit=1)[-1]
    method = "lora" if name.startswith("lora") else "full"
    if name.startswith("qlora") or config.flag("model.quantize_base"):
        method = "qlora"
    if not component:
        return
    note = "the weights are read from the folder; the name tells the method only"
    config.carry(path, "tune.method", method, note)
    config.idle("`tune: qlora` holds it" if method == "qlora" else "off", "model.quantize_base")
    if method == "full":
        return
    config.take_all(
        ("model.lora_rank", "tune.rank", 8),
        ("model.lora_alpha", "tune.alpha", 16.0),
        ("model.lora_dropout", "tune.dropout"),
        ("model.use_dora", "tune.dora"),
    )
    modules = config.words("model.lora_attn_modules")
    targets = list(dict.fromkeys(ATTENTION.get(module, module) for module in modules))
    if config.flag("model.apply_lora_to_mlp"):
        targets += MLP
    if modules:
        config.carry("model.lora_attn_modules", "tune.targets", targets, "in transformers' names")
    config.idle("`targets`", "model.apply_lora_to_mlp")
    head = bool(config.flag("model.apply_lora_to_output"))
    config.drop("model.apply_lora_to_output", "no adapter on the head" if head else "off", matters=head)


def _training(config: ConfigReader) -> None:
    if config.take("tokenizer.max_seq_len", "train.seq_len") is None:
        config.leave("tokenizer.max_seq_len", "no limit there; Stoker cuts at 1024: write `seq_len`", matters=True)
    config.take("batch_size", "train.micro_batch")
    config.take("gradient_accumulation_steps", "train.accumulation")
    if config.take("seed", "seed") is None:
        config.leave("seed", "a new one every time there, 0 here")
    limit = config.whole("max_steps_per_epoch")
    if limit:
        steps = max(1, round(limit * (config.number("epochs") or 1)))
        config.carry("max_steps_per_epoch", "steps", steps, "times the epochs, at most")
        config.idle("`steps` holds them", "epochs")
    else:
        config.take("epochs", "epochs")
    precision = config.text("dtype")
    if precision in ("bf16", "fp32", "fp16"):
        note = "the weights that are trained stay in fp32; there they are bf16 too" if precision == "bf16" else ""
        config.carry("dtype", "train.precision", precision, note)
    elif precision is not None:
        config.problem("dtype", f"Stoker does not compute in `{precision}`", "write bf16, fp16 or fp32")
    compiled = config.value("compile")
    if isinstance(compiled, dict):
        config.carry("compile", "train.compile", any(map(bool, compiled.values())))
    else:
        config.take("compile", "train.compile")
    config.take_all(
        ("run_val_every_n_steps", "evaluate.every"),
        ("save_every_n_steps", "checkpoint.every"),
        ("keep_last_n_checkpoints", "checkpoint.keep"),
        ("checkpointer.keep_last_n_checkpoints", "checkpoint.keep"),
    )


def _optimizer(config: ConfigReader) -> None:
    component, is_sgd = config.text(f"optimizer.{COMPONENT}"), False
    if component is not None:
        is_sgd = carry_optimizer(config, f"optimizer.{COMPONENT}")
        config.take("optimizer.lr", "train.lr", 1e-3)
        decay = 0.01 if component.endswith("AdamW") else 0.0  # as in PyTorch
        config.take("optimizer.weight_decay", "train.weight_decay", decay)
    if not carry_betas(config, "optimizer.betas") and component is not None:
        config.default("train.beta2", 0.999)
    config.take("optimizer.eps", "train.eps")
    config.take("optimizer.momentum", "train.beta1", 0.0 if is_sgd else None)
    schedule = config.text(f"lr_scheduler.{COMPONENT}")
    if schedule is None:
        config.default("train.schedule", "constant")
        config.default("train.warmup", 0)
    elif schedule.endswith("cosine_schedule_with_warmup"):
        config.carry(f"lr_scheduler.{COMPONENT}", "train.schedule", "cosine")
        config.take("lr_scheduler.num_warmup_steps", "train.warmup")
    else:
        config.drop(f"lr_scheduler.{COMPONENT}", "Stoker has linear, cosine, wsd and constant", matters=True)
    config.take("clip_grad_norm", "train.clip", 0.0)


def _layout(config: ConfigReader) -> None:
    recompute = config.flag("enable_activation_checkpointing")
    if config.text("ac_mode") == "selective":
        config.carry("ac_mode", "parallel.recompute", "selective")
        config.idle("ac_mode says it", "enable_activation_checkpointing")
    elif recompute is not None:
        config.carry("enable_activation_checkpointing", "parallel.recompute", "full" if recompute else "none")
    config.idle("enable_activation_checkpointing says it", "ac_mode")
    config.drop("ac_option", "which blocks: Stoker recomputes all alike", matters=True)
    for key in ("enable_activation_offloading", "activation_offloading"):
        carry_activation_offload(config, key)
    config.take("tensor_parallel_dim", "parallel.tensor")
    config.take("context_parallel_dim", "parallel.context")
    config.idle("the model's family says which matrix is split how", "tensor_parallel_plan")
    if any(config.value(key) is not None for key in DISTRIBUTED):
        _sharding(config)


def _sharding(config: ConfigReader) -> None:
    reshard = config.flag("fsdp_reshard_after_forward")
    if reshard is not None:
        config.carry("fsdp_reshard_after_forward", "parallel.shard", "zero3" if reshard else "zero2")
    else:
        config.default("parallel.shard", "zero3", "the distributed recipes shard by FSDP")
    config.switch("fsdp_cpu_offload", "parallel.offload", "params", "optimizer states too")
    shard, replicate = config.whole("data_parallel_shard_dim"), config.whole("data_parallel_replicate_dim")
    if shard is not None and shard > 0:
        config.carry("data_parallel_shard_dim", "parallel.data", shard * max(1, replicate or 1), "shard x replicate")
        config.also("parallel.shard_size", shard)
    else:
        config.drop("data_parallel_shard_dim", "-1: what the other axes leave of all processes")
    config.drop("data_parallel_replicate_dim", "`data` holds it" if shard and shard > 0 else "over all processes")
