"""Accelerate's YAML: the number of processes, and how FSDP, DeepSpeed or Megatron-LM shards the work over them."""

from __future__ import annotations

from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.deepspeed import AUTO, carry_stage, read_named
from stoker.job.importers.foreign_names import drop_experts
from stoker.job.importers.fsdp import read_fsdp_config
from stoker.job.importers.offload import carry_offload

FREE = {
    "machines and their addresses are the launcher's": "machine_rank main_process_ip main_process_port rdzv_backend "
    "same_network main_training_function enable_cpu_affinity mpirun_config.* command_file commands "
    "deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile "
    "deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_exclusion_filter",
    "Stoker runs where it is started; a cloud's account is not its concern": "compute_environment",
    "for TPUs: not supported": "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env downcast_bf16",
    "the device is what there is": "use_cpu ipex_config.* dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic "
    "dynamo_config.dynamo_use_fullgraph dynamo_config.dynamo_use_regional_compilation",
    "failures are always explained": "debug",
    "the model is built without memory, whatever the layout": "deepspeed_config.zero3_init_flag",
    "a checkpoint of Stoker holds whole tensors": "deepspeed_config.zero3_save_16bit_model",
    "experts are found by the model's family": "deepspeed_config.deepspeed_moe_layer_cls_names",
    "Stoker uses PyTorch's attention": "megatron_lm_config.megatron_lm_attention_backend "
    "parallelism_config.parallelism_config_sp_attn_implementation",
    "Stoker's ulysses needs no length": "parallelism_config.parallelism_config_sp_seq_length "
    "parallelism_config.parallelism_config_sp_seq_length_is_variable",
    "idle: for a layout that the file does not use": "parallelism_config.parallelism_config_cp_backend "
    "parallelism_config.parallelism_config_sp_backend",
    "checkpoints carry the optimizer": "megatron_lm_config.megatron_lm_no_load_optim "
    "megatron_lm_config.megatron_lm_no_save_optim",
    "full recomputation has no variants here": "megatron_lm_config.megatron_lm_recompute_method "
    "megatron_lm_config.megatron_lm_recompute_num_layers",
}
LOST = {
    "under `tune: full`, write `train.float8` yourself": "fp8_config.*",
    "no counterpart in Stoker": "megatron_lm_config.* deepspeed_config.offload_optimizer_nvme_path "
    "deepspeed_config.offload_param_nvme_path",
    "SageMaker's": "ec2_instance_type iam_role_name image_uri profile region base_job_name sagemaker_inputs_file "
    "sagemaker_metrics_file additional_args pytorch_version transformers_version py_version",
}
TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU", "TP", "FSDP", "DEEPSPEED",
    "MEGATRON_LM",
)  # fmt: skip


def read_accelerate(document: JobDocument) -> ConfigReader:
    """Reads an Accelerate file. A DeepSpeed file that it names is read with it."""
    config = ConfigReader(document, "Accelerate", engine=True)
    kind = (config.text("distributed_type") or "NO").upper()
    if kind in TYPES:
        why = {"NO": "one process", "MULTI_GPU": "data parallel: `data`"}.get(kind, "its block says how")
        config.drop("distributed_type", why)
    else:
        config.problem("distributed_type", f"Stoker has no counterpart of `{kind}`", f"known are {', '.join(TYPES)}")
    _processes(config, kind)
    _precision(config)
    read_fsdp_config(config, asked=kind == "FSDP", on_machine=_on_machine(config))
    _deepspeed(config, kind)
    _megatron(config, kind)
    _axes(config)
    backend = config.text("dynamo_config.dynamo_backend")
    if backend is not None:
        config.carry("dynamo_config.dynamo_backend", "train.compile", backend.upper() != "NO")
    config.sweep([FREE], [LOST])
    return config


def _processes(config: ConfigReader, kind: str) -> None:
    number = config.whole("num_processes")
    if number is not None:
        config.processes = number if number > 0 and kind != "NO" else None
        config.drop("num_processes", "`data` x tensor x pipeline x context" if kind != "NO" else "one process")
    machines = config.whole("num_machines")
    what = f"start Stoker on {machines} machines with a launcher (torchrun, Slurm)" if machines != 1 else "one machine"
    config.drop("num_machines", what, matters=(machines or 0) > 1)
    devices = config.text("gpu_ids") or (",".join(config.words("gpu_ids")) or None)
    if devices is None or devices.lower() == "all":
        if devices is not None:
            config.drop("gpu_ids", "the machine's first ones")
        return
    numbers = [word.strip() for word in devices.split(",")]
    if all(word.isdigit() for word in numbers):
        config.carry("gpu_ids", "parallel.devices", [int(word) for word in numbers])
    else:
        config.problem("gpu_ids", "`gpu_ids` must be numbers with commas, or all", '"0,1"')


def _on_machine(config: ConfigReader) -> int | None:
    """Returns the data-parallel processes of each machine; None if the file does not say it."""
    processes, machines = config.whole("num_processes"), config.whole("num_machines")
    if config.value("parallelism_config") is not None or not processes or not machines or processes % machines:
        return None
    return processes // machines


def _precision(config: ConfigReader) -> None:
    word = (config.text("mixed_precision") or "").lower()
    if word in ("bf16", "fp16"):
        config.carry("mixed_precision", "train.precision", word)
    elif word in ("no", "false"):
        config.drop("mixed_precision", "no: the trainer's own file says which")
        config.default("train.precision", "fp32")
    elif word:
        config.drop("mixed_precision", "Stoker computes in bf16, fp16 or fp32", matters=True)


def _is_used(config: ConfigReader, block: str, kind: str, wanted: str) -> bool:
    """Returns whether a block exists and the file selects its engine; the block of another engine is dropped."""
    if config.value(block) is None:
        return False
    if kind != wanted:
        config.drop(block, f"idle: distributed_type is not {wanted}")
    return kind == wanted


def _deepspeed(config: ConfigReader, kind: str) -> None:
    block = "deepspeed_config"
    if not _is_used(config, block, kind, "DEEPSPEED"):
        return
    name = read_named(config, f"{block}.deepspeed_config_file")
    if carry_stage(config, f"{block}.zero_stage") is None and name is None:
        config.default("parallel.shard", "zero2")
    for part in ("param", "optimizer"):
        carry_offload(config, f"{block}.offload_{part}_device", part)
    for key, target in (("gradient_accumulation_steps", "train.accumulation"), ("gradient_clipping", "train.clip")):
        if config.value(f"{block}.{key}") == "auto":
            config.drop(f"{block}.{key}", AUTO)
        else:
            config.take(f"{block}.{key}", target)


def _megatron(config: ConfigReader, kind: str) -> None:
    if not _is_used(config, "megatron_lm_config", kind, "MEGATRON_LM"):
        return
    block = "megatron_lm_config.megatron_lm_"
    for key, axis in (("tp_degree", "tensor"), ("pp_degree", "pipeline"), ("context_parallel_size", "context")):
        size = config.whole(block + key)
        if size is not None:
            config.carry(block + key, f"parallel.{axis}", max(1, size))
    drop_experts(config, f"{block}expert_model_parallel_size")
    config.take(f"{block}num_micro_batches", "train.accumulation")
    config.take(f"{block}gradient_clipping", "train.clip")
    granularity = config.text(f"{block}recompute_granularity")
    if granularity in ("full", "selective"):
        config.carry(f"{block}recompute_granularity", "parallel.recompute", granularity)
    if (config.whole(f"{block}tp_degree") or 1) == 1 and config.flag(f"{block}sequence_parallelism"):
        config.drop(f"{block}sequence_parallelism", "idle: one process of `tensor`")
    else:
        config.switch(f"{block}sequence_parallelism", "parallel.sequence", True)
    config.switch(f"{block}recompute_activations", "parallel.recompute", "selective")
    config.switch(f"{block}use_distributed_optimizer", "parallel.shard", "zero1")
    config.switch(f"{block}optimizer_cpu_offload", "parallel.offload", "optimizer")


def _axes(config: ConfigReader) -> None:
    if not isinstance(config.value("parallelism_config"), dict):
        return
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    keys = {name: f"parallelism_config.parallelism_config_{name}_size" for name in names}
    sizes = {name: config.whole(key) or 1 for name, key in keys.items()}
    for name, axis in (("tp", "tensor"), ("cp", "context"), ("sp", "context")):
        if name == "sp" and sizes["sp"] <= 1:
            config.drop(keys[name], "one process")
        elif config.value(keys[name]) is not None:
            config.carry(keys[name], f"parallel.{axis}", sizes[name])
            if name == "sp":
                config.also("parallel.context_by", "ulysses")
    first = "dp_replicate" if config.value(keys["dp_shard"]) is None else "dp_shard"
    if config.value(keys[first]) is not None:
        data = sizes["dp_replicate"] * sizes["dp_shard"]
        config.carry(keys[first], "parallel.data", data, "dp_replicate x dp_shard")
        if sizes["dp_shard"] > 1:
            config.also("parallel.shard_size", sizes["dp_shard"])
        config.idle("`data` holds it: dp_replicate x dp_shard", keys["dp_replicate"])
    strategy = "parallelism_config.parallelism_config_cp_comm_strategy"
    config.drop(strategy, "keys and values are gathered (`context_by: gather`)")
