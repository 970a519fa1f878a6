"""DeepSpeed's JSON: ZeRO stages, offloading, the batch, precision, optimizer, scheduler, clipping."""

from __future__ import annotations

from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_file import find_beside, read_source
from stoker.job.importers.foreign_names import carry_betas, carry_optimizer
from stoker.job.importers.offload import NOT_OFFLOADED, carry_offload
from stoker.job.keys.key_paths import KeyPath
from stoker.job.keys.schema_errors import shown_value

AUTO = "auto: what the trainer's own file says"
WHY_ZERO = "Stoker cuts and overlaps its traffic by itself"
FREE = {
    WHY_ZERO: "zero_optimization.contiguous_gradients zero_optimization.overlap_comm zero_optimization.reduce_scatter "
    "zero_optimization.reduce_bucket_size zero_optimization.allgather_partitions "
    "zero_optimization.allgather_bucket_size zero_optimization.sub_group_size "
    "zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.round_robin_gradients "
    "zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size "
    "zero_optimization.stage3_param_persistence_threshold zero_optimization.param_persistence_threshold "
    "zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters "
    "zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance "
    "zero_optimization.model_persistence_threshold zero_optimization.stage3_module_granularity_threshold "
    "zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential "
    "zero_optimization.memory_efficient_linear zero_optimization.ignore_unused_parameters "
    "zero_optimization.legacy_stage1 zero_optimization.parameter_alignment zero_optimization.leaf_module.* "
    "zero_optimization.compute_grad_norm zero_optimization.override_module_apply "
    "zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks "
    "zero_optimization.cpu_offload_use_pin_memory zero_optimization.stage3_gather_fp16_weights_on_model_save "
    "zero_optimization.offload_optimizer.* zero_optimization.offload_param.* "
    "zero_optimization.pipeline_loading_checkpoint",
    "a checkpoint of Stoker holds whole tensors, whatever the layout": "checkpoint.* "
    "zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.gather_16bit_weights_on_model_save "
    "zero_optimization.elastic_checkpoint zero_optimization.load_from_fp32_weights",
    "every optimizer of Stoker is sharded alike": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "every step is logged": "steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler.* "
    "comms_logger.* tensorboard.* wandb.* csv_monitor.* comet.* monitor_config.*",
    "the scaler of fp16 sets itself": "fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis "
    "fp16.consecutive_hysteresis fp16.min_loss_scale fp16.auto_cast fp16.fp16_master_weights_and_grads "
    "fp16.fp16_opt_level bf16.check_overflow bf16.immediate_grad_update bf16.bf16_master_weights_and_grads "
    "bf16.bf16_optimizer_states bf16.auto_cast",
    "gradients are reduced exactly": "prescale_gradients gradient_predivide_factor communication_data_type "
    "seq_parallel_communication_data_type disable_allgather sparse_gradients gradient_allreduce_op "
    "data_types.grad_accum_dtype",
    "removed from DeepSpeed itself, or never read by it": "amp.* elasticity.* nebula.* compression_training.* "
    "eigenvalue.* sparse_attention.* quantize_training.* graph_harvesting "
    "zero_optimization.zero_quantized_nontrainable_weights",
    "Stoker's own": "aio.* autotuning.* dataloader_drop_last use_data_before_expert_parallelism seed vocabulary_size "
    "managed_gradient_accumulation disable_python_gc log_level tag_validation load_universal compile.* hybrid_engine.*",
    "write `recompute` under `parallel:` where the model's code asks for it": "activation_checkpointing.*",
    "the optimizer's own way of computing": "optimizer.params.torch_adam optimizer.params.adam_w_mode "
    "optimizer.params.bias_correction optimizer.params.freeze_step optimizer.params.cuda_aware "
    "optimizer.params.comm_backend_name optimizer.legacy_fusion",
    "the end of the warm-up is `lr`, its beginning near 0": "scheduler.params.warmup_min_lr "
    "scheduler.params.warmup_min_ratio scheduler.params.last_batch_iteration",
}
LOST = {
    "no counterpart: Stoker's traffic is not quantised": "zero_optimization.zero_quantized_weights "
    "zero_optimization.zero_quantized_gradients zero_optimization.zenflow.*",
    "one sharding for forward and backward pass": "zero_optimization.zero_hpz_partition_size",
    "no curriculum: rows are shuffled": "curriculum_learning.* data_efficiency.* progressive_layer_drop.*",
    "a torch_autocast block: precision says it": "torch_autocast.*",
}
STAGES = {0: "none", 1: "zero1", 2: "zero2", 3: "zero3"}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_deepspeed(document: JobDocument) -> ConfigReader:
    """Reads a DeepSpeed file. ``auto`` means the value in the trainer's own file."""
    config = ConfigReader(document, "DeepSpeed", engine=True)
    for block in ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "bfloat16"):
        if not isinstance(config.value(block), dict | None):
            config.problem(block, f"`{block}` must be a block of keys, not {shown_value(config.value(block))}")
    _drop_autos(config, (), document.data)
    _zero(config)
    _batch(config)
    _precision(config)
    _optimizer(config)
    _scheduler(config)
    _axes(config)
    config.sweep([FREE], [LOST])
    return config


def read_deepspeed_key(config: ConfigReader) -> None:
    """Reads ``deepspeed`` of a trainer's file: a block, or the name of a file that is read with it."""
    value = config.value("deepspeed")
    if isinstance(value, dict):
        marks = {path[1:]: mark for path, mark in config.document.marks.items() if path[0] == "deepspeed" and path[1:]}
        config.absorb(read_deepspeed(JobDocument(config.document.file, value, marks)))
        config.drop("deepspeed", "read as a DeepSpeed file")
    else:
        read_named(config, "deepspeed")


def read_named(config: ConfigReader, key: str) -> str | None:
    """Reads the DeepSpeed file that is named at a key, if any; returns its name."""
    name = config.text(key)
    if name is None:
        return None
    found = find_beside(name, config.document)
    if found is None:
        config.drop(key, "there is no such file here: give it as a second FILE", matters=True)
    else:
        config.absorb(read_deepspeed(read_source(found)))
        config.drop(key, f"read with this file: {found}")
    return name


def _drop_autos(config: ConfigReader, path: KeyPath, value: object) -> None:
    if value == "auto":
        config.drop(path, AUTO)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _drop_autos(config, (*path, key), inner)


def _zero(config: ConfigReader) -> None:
    block = "zero_optimization"
    carry_stage(config, f"{block}.stage")
    for part in ("param", "optimizer"):
        carry_offload(config, f"{block}.offload_{part}.device", part)
    for key, target in (("cpu_offload_param", "params"), ("cpu_offload", "optimizer")):
        config.switch(f"{block}.{key}", "parallel.offload", target, off=NOT_OFFLOADED)
    if (config.whole(f"{block}.mics_shard_size") or 0) > 0:
        config.take(f"{block}.mics_shard_size", "parallel.shard_size")
    else:
        config.idle("-1: one copy over all", f"{block}.mics_shard_size")
    config.drop(f"{block}.mics_hierarchical_params_gather", WHY_ZERO)


def carry_stage(config: ConfigReader, key: str) -> int | None:
    """Carries ZeRO's stage; returns it."""
    stage = config.whole(key)
    if stage is not None and stage not in STAGES:
        config.problem(key, f"there is no ZeRO stage {stage}", "0, 1, 2 or 3")
    elif stage is not None:
        config.carry(key, "parallel.shard", STAGES[stage])
    return stage


def _batch(config: ConfigReader) -> None:
    batch = config.take("train_batch_size", "train.batch")
    micro = config.take("train_micro_batch_size_per_gpu", "train.micro_batch")
    accumulation = config.take("gradient_accumulation_steps", "train.accumulation")
    if batch and micro and accumulation and batch % (micro * accumulation) == 0:
        config.processes = batch // (micro * accumulation)


def _precision(config: ConfigReader) -> None:
    for block, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        config.switch(f"{block}.enabled", "train.precision", precision)
    if not any(config.value(block) for block in ("fp16", "bf16", "bfloat16", "torch_autocast")):
        config.default("train.precision", "fp32")
    if config.value("gradient_clipping") is None:
        config.default("train.clip", 0.0, "no clipping")
    else:
        config.take("gradient_clipping", "train.clip")


def _optimizer(config: ConfigReader) -> None:
    is_sgd = carry_optimizer(config, "optimizer.type", decides=True)
    params = "optimizer.params"
    config.take_all(
        (f"{params}.lr", "train.lr"), (f"{params}.eps", "train.eps"), (f"{params}.weight_decay", "train.weight_decay")
    )
    if not carry_betas(config, f"{params}.betas") and config.value(f"{params}.betas") not in (None, "auto"):
        config.problem(f"{params}.betas", "`betas` must be two numbers", "[0.9, 0.999]")
    config.take(f"{params}.momentum", "train.beta1", 0.0 if is_sgd else None)


def _scheduler(config: ConfigReader) -> None:
    name = config.text("scheduler.type")
    if name is None:
        return
    if name not in SCHEDULERS:
        config.drop("scheduler.type", f"Stoker has {', '.join(SCHEDULERS.values())} and wsd", matters=True)
        config.leave("scheduler.params", f"of {name}")
        return
    config.carry("scheduler.type", "train.schedule", SCHEDULERS[name], decides=True)
    params = "scheduler.params"
    config.take(f"{params}.warmup_num_steps", "train.warmup", 1000)
    if config.value(f"{params}.warmup_type") == "linear":
        config.drop(f"{params}.warmup_type", "always linear here")
    else:
        config.leave(f"{params}.warmup_type", "logarithmic there (its default), linear here", matters=True)
    config.take(f"{params}.cos_min_ratio", "train.min_lr", 1e-4 if name == "WarmupCosineLR" else None)
    config.take(f"{params}.warmup_max_lr", "train.lr", note="the scheduler's lr replaces the optimizer's")
    config.take(f"{params}.total_num_steps", "steps")


def _axes(config: ConfigReader) -> None:
    for key in ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "tensor_parallel.tp_size"):
        size = config.whole(key)
        if size is not None:
            config.carry(key, "parallel.tensor", max(1, size))
    if (config.take("sequence_parallel_size", "parallel.context") or 0) > 1:
        config.also("parallel.context_by", "ulysses")
    config.take("pipeline.stages", "parallel.pipeline")
