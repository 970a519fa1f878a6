"""Accelerate's YAML: how many processes, and how FSDP, DeepSpeed or Megatron-LM spreads the work over them."""

from __future__ import annotations

from stoker.job.importers.deepspeed import AUTO, STAGES, carry_offload
from stoker.job.importers.engine_files import read_into
from stoker.job.importers.foreign_file import find_beside, read_source
from stoker.job.importers.foreign_names import read_fsdp
from stoker.job.importers.ledger import Ledger
from stoker.job.yaml_document import JobDocument

FREE = {
    "machines and their addresses are the launcher's": "machine_rank main_process_ip main_process_port rdzv_backend "
    "same_network main_training_function enable_cpu_affinity mpirun_config.* command_file commands "
    "deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile "
    "deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_exclusion_filter",
    "Stoker runs where it is started; a cloud's account is not its concern": "compute_environment",
    "for TPUs, which Stoker has not": "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env downcast_bf16",
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
    "idle: of a layout that is not asked for": "parallelism_config.parallelism_config_cp_backend "
    "parallelism_config.parallelism_config_sp_backend",
    "checkpoints carry the optimizer": "megatron_lm_config.megatron_lm_no_load_optim "
    "megatron_lm_config.megatron_lm_no_save_optim",
    "full recomputation has no variants here": "megatron_lm_config.megatron_lm_recompute_method "
    "megatron_lm_config.megatron_lm_recompute_num_layers",
}
LOST = {
    "Stoker computes in bf16, fp16 or fp32": "fp8_config.*",
    "no counterpart in Stoker": "megatron_lm_config.* deepspeed_config.offload_optimizer_nvme_path "
    "deepspeed_config.offload_param_nvme_path",
    "SageMaker's": "ec2_instance_type iam_role_name image_uri profile region base_job_name sagemaker_inputs_file "
    "sagemaker_metrics_file additional_args pytorch_version transformers_version py_version",
}
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU", "TP")


def read_accelerate(document: JobDocument) -> Ledger:
    """Reads an Accelerate file. A DeepSpeed file that it names is read with it."""
    ledger = Ledger(document, "Accelerate", engine=True)
    kind = (ledger.text("distributed_type") or "NO").upper()
    known = (*TYPES, "FSDP", "DEEPSPEED", "MEGATRON_LM")
    if kind in known:
        if ledger.value("distributed_type") is not None:
            why = {"NO": "one process", "MULTI_GPU": "data parallel: `data`"}.get(kind, "its block says how")
            ledger.drop("distributed_type", why)
    elif ledger.value("distributed_type") is not None:
        ledger.problem("distributed_type", f"Stoker has no counterpart of `{kind}`", f"known are {', '.join(known)}")
    _processes(ledger, kind)
    _precision(ledger)
    read_fsdp(ledger, "fsdp_config", asked=kind == "FSDP")
    _deepspeed(ledger, kind)
    _megatron(ledger, kind)
    _axes(ledger)
    backend = ledger.text("dynamo_config.dynamo_backend")
    if backend is not None:
        ledger.carry("dynamo_config.dynamo_backend", "train.compile", backend.upper() != "NO")
    ledger.sweep(FREE, matters=LOST)
    return ledger


def _processes(ledger: Ledger, kind: str) -> None:
    number = ledger.whole("num_processes")
    if number is not None:
        ledger.processes = number if number > 0 and kind != "NO" else None
        ledger.drop("num_processes", "`data` x tensor x pipeline x context" if kind != "NO" else "one process")
    machines = ledger.whole("num_machines")
    if machines is not None:
        what = (
            "one machine" if machines == 1 else f"start Stoker on {machines} machines with a launcher (torchrun, Slurm)"
        )
        ledger.drop("num_machines", what, matters=machines > 1)
    devices = ledger.text("gpu_ids") or (",".join(ledger.words("gpu_ids")) or None)
    if devices is None or devices.lower() == "all":
        if devices is not None:
            ledger.drop("gpu_ids", "the machine's first ones")
        return
    numbers = [word.strip() for word in devices.split(",")]
    if all(word.isdigit() for word in numbers):
        ledger.carry("gpu_ids", "parallel.devices", [int(word) for word in numbers])
    else:
        ledger.problem("gpu_ids", "`gpu_ids` must be numbers with commas, or all", '"0,1"')


def _precision(ledger: Ledger) -> None:
    word = (ledger.text("mixed_precision") or "").lower()
    if word in ("bf16", "fp16"):
        ledger.carry("mixed_precision", "train.precision", word)
    elif word in ("no", "false"):
        ledger.drop("mixed_precision", "no: the trainer's own file says which")
        ledger.default("train.precision", "fp32")
    elif word:
        ledger.drop("mixed_precision", "Stoker computes in bf16, fp16 or fp32", matters=True)


def _is_used(ledger: Ledger, block: str, kind: str, wanted: str) -> bool:
    """Whether a block is there and its engine is the one that the file asks for; an idle one is dropped."""
    if ledger.value(block) is None:
        return False
    if kind != wanted:
        ledger.drop(block, f"idle: distributed_type is not {wanted}")
    return kind == wanted


def _deepspeed(ledger: Ledger, kind: str) -> None:
    block = "deepspeed_config"
    if not _is_used(ledger, block, kind, "DEEPSPEED"):
        return
    name = _deepspeed_file(ledger, f"{block}.deepspeed_config_file")
    stage = ledger.whole(f"{block}.zero_stage")
    if stage is not None and stage in STAGES:
        ledger.carry(f"{block}.zero_stage", "parallel.shard", STAGES[stage])
    elif stage is not None:
        ledger.problem(f"{block}.zero_stage", f"there is no ZeRO stage {stage}", "0, 1, 2 or 3")
    elif name is None:
        ledger.default("parallel.shard", "zero2")
    for part in ("param", "optimizer"):
        carry_offload(ledger, f"{block}.offload_{part}_device", part)
    accumulation, clip = f"{block}.gradient_accumulation_steps", f"{block}.gradient_clipping"
    for key in (accumulation, clip):
        if ledger.value(key) == "auto":
            ledger.drop(key, AUTO)
    if not ledger.handled(accumulation):
        ledger.whole_to(accumulation, "train.accumulation")
    if not ledger.handled(clip):
        ledger.number_to(clip, "train.clip")


def _deepspeed_file(ledger: Ledger, key: str) -> str | None:
    """Reads the DeepSpeed file that is named, if any; returns its name."""
    name = ledger.text(key)
    if name is None:
        return None
    found = find_beside(name, ledger.document)
    if found is None:
        ledger.drop(key, "there is no such file here: give it as a FILE", matters=True)
    else:
        read_into(ledger, read_source(found))
        ledger.drop(key, f"read with this file: {found}")
    return name


def _megatron(ledger: Ledger, kind: str) -> None:
    block = "megatron_lm_config"
    if not _is_used(ledger, block, kind, "MEGATRON_LM"):
        return
    sizes: tuple[tuple[str, str], ...] = (
        ("tp_degree", "tensor"), ("pp_degree", "pipeline"), ("context_parallel_size", "context"),
    )  # fmt: skip
    for key, axis in sizes:
        size = ledger.whole(f"{block}.megatron_lm_{key}")
        if size is not None:
            ledger.carry(f"{block}.megatron_lm_{key}", f"parallel.{axis}", max(1, size))
    experts = ledger.whole(f"{block}.megatron_lm_expert_model_parallel_size")
    if experts is not None:
        ledger.drop(
            f"{block}.megatron_lm_expert_model_parallel_size", "experts are spread as `tensor`", matters=experts > 1
        )
    ledger.whole_to(f"{block}.megatron_lm_num_micro_batches", "train.accumulation")
    ledger.number_to(f"{block}.megatron_lm_gradient_clipping", "train.clip")
    tensor = ledger.whole(f"{block}.megatron_lm_tp_degree") or 1
    granularity = ledger.text(f"{block}.megatron_lm_recompute_granularity")
    if granularity in ("full", "selective"):
        ledger.carry(f"{block}.megatron_lm_recompute_granularity", "parallel.recompute", granularity)
    for key, target, value in (
        ("sequence_parallelism", "parallel.sequence", True),
        ("recompute_activations", "parallel.recompute", "selective"),
        ("use_distributed_optimizer", "parallel.shard", "zero1"),
        ("optimizer_cpu_offload", "parallel.offload", "optimizer"),
    ):
        name = f"{block}.megatron_lm_{key}"
        asked = ledger.flag(name)
        if asked and not (key == "sequence_parallelism" and tensor == 1):
            ledger.carry(name, target, value)
        elif asked is not None:
            ledger.drop(name, "idle: one process of `tensor`" if asked else "off")


def _axes(ledger: Ledger) -> None:
    block = "parallelism_config"
    if not isinstance(ledger.value(block), dict):
        return
    sizes = {
        name: ledger.whole(f"{block}.parallelism_config_{name}_size") or 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    keys = {name: f"{block}.parallelism_config_{name}_size" for name in sizes}
    written = [name for name in sizes if ledger.value(keys[name]) is not None]
    for name, axis in (("tp", "tensor"), ("cp", "context"), ("sp", "context")):
        if name in written and (sizes[name] > 1 or name != "sp"):
            ledger.carry(keys[name], f"parallel.{axis}", sizes[name])
            if name == "sp" and sizes["sp"] > 1:
                ledger.also("parallel.context_by", "ulysses")
        elif name in written:
            ledger.drop(keys[name], "one process")
    if "dp_replicate" in written or "dp_shard" in written:
        data = sizes["dp_replicate"] * sizes["dp_shard"]
        first = "dp_shard" if "dp_shard" in written else "dp_replicate"
        ledger.carry(keys[first], "parallel.data", data, "dp_replicate x dp_shard")
        if sizes["dp_shard"] > 1:
            ledger.also("parallel.shard_size", sizes["dp_shard"])
        if len({"dp_replicate", "dp_shard"} & set(written)) == 2:
            ledger.drop(keys["dp_replicate"], "`data` holds it: dp_replicate x dp_shard")
    strategy = ledger.text(f"{block}.parallelism_config_cp_comm_strategy")
    if strategy is not None:
        ledger.drop(
            f"{block}.parallelism_config_cp_comm_strategy", "keys and values are gathered (`context_by: gather`)"
        )
