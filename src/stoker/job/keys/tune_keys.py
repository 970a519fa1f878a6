"""The keys of the block ``tune``, by method."""

from __future__ import annotations

from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.schema import Job

LORA = ("rank", "alpha", "dropout", "targets", "layers", "modules_to_save", "loraplus_ratio", "rslora", "dora")
KEYS: dict[str, tuple[str, ...]] = {
    "full": ("new_rows_first",),
    "lora": LORA,
    "qlora": LORA,
    "prefix": ("tokens", "projection", "width"),
    "prompt": ("tokens", "text"),
    "p-tuning": ("tokens", "deep", "encoder", "width"),
}
ADAPTERS = ("lora", "qlora")
VIRTUAL = ("prefix", "prompt", "p-tuning")  # methods that train virtual tokens


def has_prefix(method: str, *, deep: bool) -> bool:
    """Returns whether a method's virtual tokens are before every layer."""
    return method == "prefix" or (method == "p-tuning" and deep)


def keys_of(method: str, *, deep: bool = False) -> tuple[str, ...]:
    """Returns the keys of a method; ``deep`` virtual tokens have no encoder."""
    return ("tokens", "deep") if deep and method == "p-tuning" else KEYS[method]


def methods_with(key: str) -> list[str]:
    """Returns the methods that a key has an effect in."""
    return [method for method, keys in KEYS.items() if key in keys]


def virtual_tokens(job: Job) -> int:
    """Positions that the job's method puts in front of every sequence."""
    return job.tune.tokens if job.tune.method in VIRTUAL else 0


def can_merge(job: Job) -> bool:
    """Returns whether the trained weights can be merged into the base without rounding them away."""
    return job.tune.method not in VIRTUAL and (job.model is None or job.model.quantise == "none")


def block_numbers(written: str, count: int) -> set[int]:
    """Returns the blocks that ``tune.layers`` means, such as ``0-3,20-``, counted from 0.

    Raises:
        UserError: the model has no such blocks.
    """
    numbers: set[int] = set()
    for part in written.split(","):
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last) if last else count - 1 if dash else int(first)
        if end >= count or begin >= count:
            raise UserError(f"tune.layers: the model has the blocks 0 to {count - 1}, and none of the number {part}")
        if end < begin:
            raise UserError(f"tune.layers: {part} runs backwards; write {end}-{begin}")
        numbers |= set(range(begin, end + 1))
    return numbers


assert {key for keys in KEYS.values() for key in keys} == set(TuneBlock.model_fields) - {"method"}
