"""The tools' names of tasks, tuning methods, optimizers and schedules, translated to the job's."""

from __future__ import annotations

import re

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.keys.annotations import choices
from stoker.job.keys.key_paths import field_at, parse_key

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
