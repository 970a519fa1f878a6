"""Accelerate's files: its engines and their axes."""

from __future__ import annotations

import pytest
from foreign import ACCELERATE, checked, lost, why, written

from stoker.errors import UserError
from stoker.job.importers import import_files


def test_accelerate_s_megatron_and_axes() -> None:
    megatron = (
        "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config: {megatron_lm_tp_degree: 2, "
        "megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4, megatron_lm_sequence_parallelism: true, "
        "megatron_lm_use_distributed_optimizer: true, megatron_lm_gradient_clipping: 1.0, "
        "megatron_lm_recompute_activations: true}\n"
    )
    job = checked(import_files([written(megatron)])).job
    parts = job.parallel
    assert (parts.data, parts.tensor, parts.pipeline, parts.shard) == (2, 2, 2, "zero1")
    assert (parts.sequence, parts.recompute, job.train.accumulation) == (True, "selective", 4)
    axes = ACCELERATE + (
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2, "
        "parallelism_config_tp_size: 2, parallelism_config_cp_size: 1, "
        "parallelism_config_cp_comm_strategy: allgather}\n"
    )
    parts = checked(import_files([written(axes)])).job.parallel
    assert (parts.data, parts.shard_size, parts.tensor, parts.shard) == (4, 2, 2, "zero3")
    odd = megatron.replace("num_processes: 8", "num_processes: 6")
    with pytest.raises(UserError, match="6 processes are not a multiple of tensor x pipeline x context = 4"):
        import_files([written(odd)])


def test_accelerate_s_deepspeed_block() -> None:
    block = "{zero_stage: 3, offload_param_device: cpu, offload_optimizer_device: cpu, zero3_init_flag: true}"
    given = written(ACCELERATE, distributed_type="DEEPSPEED", deepspeed_config=block, num_processes="2")
    imported = import_files([given])
    parts = checked(imported).job.parallel
    assert (parts.shard, parts.offload, parts.data) == ("zero3", "params", 2)
    assert why(imported, "fsdp_config") == "idle: the file does not ask for FSDP"


def test_only_blocks_without_a_file_are_marked_as_examples() -> None:
    text = import_files([written(ACCELERATE)]).text
    assert "data:  # an example: write your own" in text
    assert "  data: 8  # of the processes that the files name" in text


def test_hybrid_sharding_has_the_size_of_a_machine_where_the_file_says_it() -> None:
    given = ACCELERATE.replace("num_machines: 1\n", "").replace("num_processes: 8", "num_processes: 16")
    hybrid = given.replace("fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: HYBRID_SHARD")
    parts = checked(import_files([written(hybrid + "num_machines: 2\n")])).job.parallel
    assert (parts.data, parts.shard, parts.shard_size) == (16, "zero3", 8)
    unknown = import_files([written(hybrid)])
    assert "fsdp_config.fsdp_sharding_strategy" in lost(unknown)
