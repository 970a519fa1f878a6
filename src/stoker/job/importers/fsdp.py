"""FSDP's options: the keys by which a trainer's file asks for it, and the block ``fsdp_config``, also Accelerate's."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.keys.schema_errors import SPELT_FALSE, SPELT_TRUE

SHARDINGS = {
    "full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "none", "hybrid_shard": "zero3",
    "hybrid_shard_zero2": "zero2", "1": "zero3", "2": "zero2", "3": "none", "4": "zero3", "5": "zero2",
}  # fmt: skip
HYBRID = "sharded within a machine, replicated between them: write `shard_size` (devices of a machine)"
FSDP = "fsdp_config"
FREE = {
    "Stoker shards block by block, always": "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params "
    "use_orig_params wrap",
    "Stoker reads each process's part of the weights only": "cpu_ram_efficient_loading sync_module_states",
    "PyTorch's fully_shard prefetches by itself": "backward_prefetch forward_prefetch limit_all_gathers",
    "a checkpoint of Stoker fits every layout": "state_dict_type final_state_dict_type",
    "fully_shard (FSDP2) is what Stoker uses": "version",
    "for XLA devices": "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt",
}


def read_fsdp(config: ConfigReader) -> None:
    """Reads ``fsdp``, ``fsdp_version`` and ``fsdp_config`` of a trainer's file."""
    value = config.value("fsdp")
    options = value.split() if isinstance(value, str) else config.words("fsdp") if isinstance(value, list) else []
    asked = bool(options) or value is True
    strategy = next((option for option in options if option.lower() in SHARDINGS), "")
    if strategy:
        _carry_sharding(config, "fsdp", strategy.lower())
        if "offload" in options:
            config.also("parallel.offload", "params")
    elif asked:
        config.carry("fsdp", "parallel.shard", "zero3")
    else:
        config.drop("fsdp", "off")
    asked = asked or config.value("fsdp_version") is not None
    config.drop("fsdp_version", "fully_shard (FSDP2) is what Stoker uses")
    if isinstance(config.value(FSDP), str):
        config.drop(FSDP, "a file of its own: write its `reshard_after_forward` as `shard`", matters=True)
    else:
        read_fsdp_config(config, asked=asked)


def read_fsdp_config(config: ConfigReader, *, asked: bool, on_machine: int | None = None) -> None:
    """Reads the keys of the block ``fsdp_config``, with or without the prefix ``fsdp_``.

    Args:
        asked: whether the file enables FSDP; its block is idle otherwise.
        on_machine: processes of each machine; None if the file does not say it.
    """
    inside = config.value(FSDP)
    if not isinstance(inside, dict):
        return
    if not asked:
        config.drop(FSDP, "idle: the file does not ask for FSDP")
        return
    names = {str(key).removeprefix("fsdp_"): f"{FSDP}.{key}" for key in inside}
    _strategy(config, names, on_machine)
    if not config.sets("parallel.shard"):
        config.default("parallel.shard", "zero3", "FULL_SHARD")
    for name, target, value in (
        ("offload_params", "parallel.offload", "params"),
        ("activation_checkpointing", "parallel.recompute", "full"),
    ):
        if name in names:
            config.switch(names[name], target, value, off="off, as by Stoker's default")
    for why, free in FREE.items():
        config.idle(why, *(names[name] for name in free.split() if name in names))


def _strategy(config: ConfigReader, names: dict[str, str], on_machine: int | None) -> None:
    """Carries the sharding strategy, by its old key or its new one."""
    old, new = names.get("sharding_strategy", ""), names.get("reshard_after_forward", "")
    for key in (key for key in (old, new) if key and config.value(key) is not None):
        word = str(config.value(key)).lower()
        if key == new and old:
            config.drop(key, "the sharding strategy says it")
        elif word in SHARDINGS:
            _carry_sharding(config, key, word, on_machine)
        elif key == new and word in (*SPELT_TRUE, *SPELT_FALSE):
            config.carry(key, "parallel.shard", "zero3" if word in SPELT_TRUE else "zero2")
        else:
            config.problem(key, f"there is no sharding strategy `{word}`", "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")


def _carry_sharding(config: ConfigReader, key: str, word: str, on_machine: int | None = None) -> None:
    """Carries a sharding strategy by its name or number, with the size of a shard where it is hybrid.

    Args:
        on_machine: processes of each machine; None if the file does not say it.
    """
    config.carry(key, "parallel.shard", SHARDINGS[word])
    if word not in ("4", "5") and "hybrid" not in word:
        return
    if on_machine is None:
        config.leave(key, HYBRID, matters=True)
    else:
        config.also("parallel.shard_size", on_machine, "num_processes / num_machines")
