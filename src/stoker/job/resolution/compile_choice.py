"""``train.compile``: whether blocks are compiled, and what ``auto`` means on a device and in a layout."""

from __future__ import annotations

from typing import Literal

from stoker.job.layout import Layout
from stoker.job.resolved import ResolvedJob

CompileChoice = Literal["never", "measured", "always"]
"""``measured``: where compiling was measured to be faster; see docs/gpu.md."""
MEASURED = ("llama",)  # transformers' ``model_type``
LEAST_STEPS = 100  # compiling took as long as it saved in about 35 steps of a model of a billion parameters


def compile_choice(job: ResolvedJob) -> CompileChoice:
    """Returns the choice of a job; ``auto`` compiles in runs of many steps on full rows."""
    if job.train.compile != "auto":
        return "always" if job.train.compile else "never"
    long = job.steps is None or job.steps >= LEAST_STEPS
    return "measured" if long and job.train.pack else "never"


def compiles(
    choice: CompileChoice, layout: Layout, *, model_type: str, tuning: str, precision: str, nvidia: bool
) -> bool:
    """Returns whether blocks are compiled.

    Measured was full tuning in 16 bits, in a layout that splits neither blocks nor rows and keeps all activations on
    the device.

    Args:
        tuning: the tuning method.
        precision: of matrix products.
        nvidia: whether the device is a GPU of NVIDIA's.
    """
    if choice != "measured":
        return choice == "always"
    whole = layout.tensor == layout.pipeline == layout.context == 1
    kept = layout.recompute == "none" and layout.offload == "none"
    narrow = precision not in ("fp32", "fp64")
    return nvidia and narrow and tuning == "full" and model_type in MEASURED and whole and kept
