"""Throughput of a layout: tokens per second, and the fraction of the devices' peak."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.time.flop import model_flop_per_token


@dataclass(frozen=True)
class Speed:
    """Throughput of a plan.

    Attributes:
        tokens_per_s: of all devices; every row counts as full.
        tokens_per_s_per_gpu: of one of them.
        mfu: model FLOP utilisation, as `mfu_formula` defines it: FLOP by the PaLM convention (N parameters, L layers of
            H heads of size Q, rows of T tokens; all attention, no recomputation) over the devices' peak
            (Chowdhery et al., 2022, appendix B). Under adapters no gradients of the N weights are counted.
    """

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float


def mfu_formula(work: TrainingWork) -> str:
    """Returns the definition of the reported MFU."""
    times = 6 if work.tuning == "full" else 4
    return f"tokens/s of a device x ({times} N + 12 L H Q T) FLOP a token / its peak FLOP/s in {work.precision}"


def tokens_per_step(setting: Setting) -> int:
    """Tokens of an optimizer step on all processes, with full rows."""
    samples = setting.layout.data * setting.micro_batch * setting.micro_batches
    return samples * setting.work.rows * setting.work.seq_len


def speed_of(setting: Setting, seconds: float) -> Speed:
    """Throughput of a layout, from its step time."""
    tokens = tokens_per_step(setting) / seconds
    each = tokens / setting.layout.world
    frozen = setting.work.tuning != "full"
    flop = model_flop_per_token(setting.shape, seq_len=setting.work.seq_len, frozen=frozen)
    return Speed(tokens, each, each * flop / setting.cluster.device.peak(setting.work.precision))
