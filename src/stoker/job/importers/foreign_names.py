"""The tools' names of optimizers, schedules and shardings, translated to the job's."""

from __future__ import annotations

import re

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.key_paths import choices, field_at, parse_key
from stoker.job.schema_errors import SPELT_FALSE, SPELT_TRUE

EIGHT_BIT = (
    "the tool keeps the optimizer's states in 8 bits, Stoker in the weights' precision: it takes more memory; "
    "`train.optimizer_states: 8bit` does the same for full tuning"
)
# The tools' names of the tasks.
TASKS = {
    "pt": "pretrain", "pretrain": "pretrain", "sft": "sft", "rm": "reward", "reward": "reward", "dpo": "dpo",
    "ppo": "ppo", "grpo": "grpo", "rloo": "rloo",
    "kd": "distillation", "gdpo": "gdpo", "ebft": "ebft",
}  # fmt: skip


def task_of(config: ConfigReader, key: str, word: str) -> str | None:
    """Carries the task, or records the problem that Stoker does not have it (yet); returns the carried task."""
    if word.lower() in options_of("dpo.loss"):
        config.carry(key, "task", "dpo")
        config.also("dpo.loss", word.lower())
        return "dpo"
    return _one_of(config, key, "task", TASKS.get(word.lower(), word.lower()), f"train `{word}`", "train")


def task_not_carried(config: ConfigReader, key: str, word: str) -> None:
    """Records the problem that the keys of this tool's task are not carried."""
    task = TASKS.get(word.lower(), word.lower())
    if task in options_of("task"):
        message = f"the keys of {config.tool}'s `{word}` are not carried yet"
        config.problem(key, message, f"write `task: {task}` by hand; `stoker new` shows its block")
    else:
        task_of(config, key, word)


def tuning_of(config: ConfigReader, key: str, word: str) -> str | None:
    """Carries the tuning method, or records the problem that Stoker does not have it (yet)."""
    return _one_of(config, key, "tune.method", word, f"tune by `{word}`", "tune by")


def _one_of(config: ConfigReader, key: str, target: str, value: str, asked: str, verb: str) -> str | None:
    can = options_of(target)
    if value in can:
        config.carry(key, target, value)
        return value
    config.problem(key, f"Stoker cannot {asked} yet", f"it can {verb} {', '.join(can)}")
    return None


def options_of(target: str) -> list[str]:
    """Returns the values that the job's key ``target`` takes by name."""
    field = field_at(parse_key(target))[0]
    return [] if field is None else choices(field.annotation)


# Names of Adam and AdamW in the tools, without variants that compute something else (galore_adamw, OneBitAdam, ...).
ADAM = re.compile(
    r"(paged_?|ao_|optimi_|fused|(deepspeed)?cpu)?adamw?(_?(8bit|4bit|32bit|fp8|hf|bnb_8bit|apex_fused|torch(_\w+)?))?"
)


def carry_optimizer(config: ConfigReader, key: str, *, decides: bool = False) -> bool:
    """Carries the optimizer's name; returns whether it is plain SGD, whose momentum is ``train.beta1``.

    Args:
        decides: see `ConfigReader.carry`.
    """
    name = config.text(key)
    if name is None:
        return False
    word = name.split(".")[-1].lower().replace("optimizernames", "")
    if "adafactor" in word:
        found, note = "adafactor", "PyTorch's Adafactor, with the job's lr"
    elif word == "muon":
        found, note = "muon", "updates are as large as AdamW's, so the same lr serves"
    elif word == "sgd":
        found, note = "sgd", "momentum is `beta1`"
    elif ADAM.fullmatch(word):
        small = any(bits in word for bits in ("8bit", "4bit", "fp8", "bnb", "paged"))
        found, note = "adamw", EIGHT_BIT if small else ""
    else:
        can = ", ".join(options_of("train.optimizer"))
        config.drop(key, f"Stoker has {can}; without a line here it takes adamw", matters=True)
        return False
    config.carry(key, "train.optimizer", found, note, decides=decides)
    return found == "sgd"


def carry_betas(config: ConfigReader, key: str) -> bool:
    """Carries AdamW's two decays, if a list of two numbers was written; returns whether it was."""
    betas = config.value(key)
    is_pair = isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas)
    if is_pair:
        config.carry(key, "train.beta1", float(betas[0]))
        config.also("train.beta2", float(betas[1]))
    return is_pair


SCHEDULES = {
    "linear": ("linear", ""),
    "cosine": ("cosine", ""),
    "cosine_with_restarts": ("cosine", "without restarts, which is the same for one cycle"),
    "cosine_with_min_lr": ("cosine", ""),
    "cosine_warmup_with_min_lr": ("cosine", ""),
    "polynomial": ("linear", "linear: the power is 1 and the end 0"),
    "constant": ("constant", ""),
    "constant_with_warmup": ("constant", ""),
    "warmup_stable_decay": ("wsd", "Stoker decays linearly over the last fifth"),
}


def carry_schedule(config: ConfigReader, key: str, lr: float | None = None) -> None:
    """Carries the schedule's name, and its end if its arguments give it."""
    name = config.text(key)
    if name is None:
        return
    found = SCHEDULES.get(name.lower())
    if found is None:
        can = ", ".join(options_of("train.schedule"))
        config.drop(key, f"Stoker has {can}; without a line here it takes cosine", matters=True)
        return
    config.carry(key, "train.schedule", *found)
    if "min_lr" not in name.lower():
        return
    end = config.number("lr_scheduler_kwargs.min_lr")
    if config.take("lr_scheduler_kwargs.min_lr_rate", "train.min_lr") is None and end is not None and lr:
        config.carry("lr_scheduler_kwargs.min_lr", "train.min_lr", float(f"{end / lr:.6g}"), "as a fraction of lr")


def drop_warmup_of_constant(config: ConfigReader, key: str) -> bool:
    """Drops the warm-up if the schedule, named at ``key``, is constant from the start; returns whether it is."""
    if (config.text(key) or "").lower() != "constant":
        return False
    for name in ("warmup_steps", "warmup_ratio"):
        config.drop(name, f"{key} `constant` has no warm-up; constant_with_warmup has")
    config.default("train.warmup", 0, "`constant` begins at lr")
    return True


def drop_experts(config: ConfigReader, key: str) -> None:
    """Drops the size of an axis for experts."""
    config.drop(key, "experts are spread as `tensor`", matters=(config.whole(key) or 0) > 1)


SHARDINGS = {
    "full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "none", "hybrid_shard": "zero3",
    "hybrid_shard_zero2": "zero2", "1": "zero3", "2": "zero2", "3": "none", "4": "zero3", "5": "zero2",
}  # fmt: skip
HYBRID = "sharded within a machine, replicated between them: write `shard_size` (devices of a machine)"
BY_BLOCK = "Stoker shards block by block, always"
FSDP = "fsdp_config"
FSDP_FREE: dict[str, str] = {
    BY_BLOCK: "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params use_orig_params wrap",
    "Stoker reads each process's part of the weights only": "cpu_ram_efficient_loading sync_module_states",
    "PyTorch's fully_shard prefetches by itself": "backward_prefetch forward_prefetch limit_all_gathers",
    "a checkpoint of Stoker fits every layout": "state_dict_type final_state_dict_type",
    "fully_shard (FSDP2) is what Stoker uses": "version",
    "for XLA devices": "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt",
}


def carry_sharding(config: ConfigReader, key: str, word: str, on_machine: int | None = None) -> None:
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


def read_fsdp(config: ConfigReader, *, asked: bool, stated: bool = False, on_machine: int | None = None) -> None:
    """Reads the keys of the block ``fsdp_config``, with or without the prefix ``fsdp_``.

    Args:
        asked: whether the file enables FSDP; its block is idle otherwise.
        stated: whether the sharding was carried already.
        on_machine: processes of each machine; None if the file does not say it.
    """
    inside = config.value(FSDP)
    if not isinstance(inside, dict):
        return
    if not asked:
        config.drop(FSDP, "idle: the file does not ask for FSDP")
        return
    names = {str(key).removeprefix("fsdp_"): f"{FSDP}.{key}" for key in inside}
    stated = _strategy(config, names, on_machine) or stated
    if not stated:
        config.default("parallel.shard", "zero3", "FULL_SHARD")
    for name, target, value in (
        ("offload_params", "parallel.offload", "params"),
        ("activation_checkpointing", "parallel.recompute", "full"),
    ):
        if name in names:
            config.switch(names[name], target, value, off="off, as by Stoker's default")
    for why, free in FSDP_FREE.items():
        config.idle(why, *(names[name] for name in free.split() if name in names))


def _strategy(config: ConfigReader, names: dict[str, str], on_machine: int | None) -> bool:
    """Carries the sharding strategy, by its old key or its new one; whether there was any."""
    old, new = names.get("sharding_strategy", ""), names.get("reshard_after_forward", "")
    for key in (key for key in (old, new) if key and config.value(key) is not None):
        word = str(config.value(key)).lower()
        if key == new and old:
            config.drop(key, "the sharding strategy says it")
        elif word in SHARDINGS:
            carry_sharding(config, key, word, on_machine)
        elif key == new and word in (*SPELT_TRUE, *SPELT_FALSE):
            config.carry(key, "parallel.shard", "zero3" if word in SPELT_TRUE else "zero2")
        else:
            config.problem(key, f"there is no sharding strategy `{word}`", "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")
    return any(entry.target == "parallel.shard" for entry in config.carried)
