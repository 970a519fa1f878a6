"""``train.compile``: whether blocks are compiled, and what ``auto`` means on a device and in a layout."""

from __future__ import annotations

from typing import Literal

from stoker.job.layout import Layout
from stoker.job.resolved import ResolvedJob

CompileChoice = Literal["never", "unsplit", "always"]
"""``unsplit``: in layouts that split neither blocks nor rows, and keep all activations on the device."""
MEASURED = ("llama",)  # transformers' ``model_type``; see docs/gpu.md
LEAST_STEPS = 100  # compiling took as long as it saved in about 35 steps of a model of a billion parameters


def compile_choice(job: ResolvedJob, *, model_type: str, precision: str, nvidia: bool) -> CompileChoice:
    """Returns the choice of a job on a kind of device.

    ``auto`` compiles what was measured to be faster: full tuning on full rows, in 16 bits or less.

    Args:
        precision: of matrix products.
        nvidia: whether the device is a GPU of NVIDIA's.
    """
    if job.train.compile != "auto":
        return "always" if job.train.compile else "never"
    measured = nvidia and precision not in ("fp32", "fp64") and model_type in MEASURED
    long = job.steps is None or job.steps >= LEAST_STEPS
    return "unsplit" if measured and long and job.tune.method == "full" and job.train.pack else "never"


def compiles_in(choice: CompileChoice, layout: Layout) -> bool:
    """Returns whether blocks are compiled in a layout of the job and the kind of device that the choice is for."""
    if choice != "unsplit":
        return choice == "always"
    whole = layout.tensor == layout.pipeline == layout.context == 1
    return whole and layout.recompute == "none" and layout.offload == "none"
