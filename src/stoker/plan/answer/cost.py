"""Cost of a run: tokens, hours, price, interruptions, and the checkpoint interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from stoker.hardware.machines.cluster import Cluster
from stoker.job.resolved import ResolvedJob
from stoker.plan.block_dtypes import FLOAT
from stoker.plan.reliability import HOUR, Forecast, InterruptionCost, forecast, mean_between
from stoker.plan.search import LayoutPlan
from stoker.plan.setting import Setting
from stoker.plan.time.speed import tokens_per_step

SAMPLE_STEPS = 1000  # steps of the cost estimate if the job's number is unknown


@dataclass(frozen=True)
class Length:
    """Length of a job's training, and its checkpoints.

    Attributes:
        steps: optimizer steps; None if it depends on the data.
        epochs: passes over the data, if the job sets them.
        save_every: steps between checkpoints; None if the job leaves it open.
        background: whether training goes on while a checkpoint is written.
    """

    steps: int | None
    epochs: float | None = None
    save_every: int | None = None
    background: bool = True

    @classmethod
    def of(cls, job: ResolvedJob) -> Length:
        """Length of a resolved job."""
        every, epochs = job.checkpoint.every, None if job.steps else job.epochs
        return cls(job.steps, epochs, every if isinstance(every, int) else None, job.checkpoint.background)


@dataclass(frozen=True)
class Cost:
    """Cost of a run of a plan.

    Attributes:
        steps: of the estimate; `SAMPLE_STEPS` if the job's number is unknown.
        known: whether they are the job's.
        tokens: of all steps.
        training: seconds of the steps alone.
        forecast: interruptions and checkpoints at the best interval.
        as_written: the same at the job's interval; None if it has none.
        saving: seconds of a checkpoint and a recovery.
        checkpoint: size of a checkpoint in bytes.
        price: of all time, interruptions included; None if the cluster has none.
        currency: of the price.
    """

    steps: int
    known: bool
    tokens: int
    training: float
    forecast: Forecast
    as_written: Forecast | None
    saving: InterruptionCost
    checkpoint: float
    price: float | None
    currency: str

    @property
    def hours(self) -> float:
        """Duration, interruptions and checkpoints included."""
        return self.forecast.seconds / HOUR

    @property
    def interval_steps(self) -> int:
        """Best number of steps between checkpoints; that of the run where no checkpoint pays."""
        return max(1, round(self.forecast.interval / self.saving.step))

    @property
    def hours_per_billion_tokens(self) -> float:
        """Hours of a billion tokens, interruptions and checkpoints included."""
        return self.hours * 1e9 / self.tokens

    @property
    def price_per_billion_tokens(self) -> float | None:
        """Price of a billion tokens; None if there is no price."""
        return None if self.price is None else self.price * 1e9 / self.tokens


def checkpoint_bytes(setting: Setting) -> float:
    """Bytes of a checkpoint: the trained weights, their optimizer states, and each process' error of PowerSGD."""
    work, software, layout = setting.work, setting.software, setting.layout
    weights = software.weights if work.tuning == "full" else FLOAT
    errors = FLOAT * layout.data * layout.context if layout.compress == "powersgd" else 0
    return float(work.trained * (weights + software.states + software.outer + errors))


def saving_of(setting: Setting, step: float, *, background: bool = True) -> InterruptionCost:
    """Seconds that checkpoints and interruptions take from a run whose steps take ``step`` seconds.

    Training waits for the copy to the host, of which every process makes an equal part. Then each node writes to
    storage at the cluster's ``storage_gbs``.

    Args:
        background: whether training goes on meanwhile.
    """
    cluster, size = setting.cluster, checkpoint_bytes(setting)
    copy = 0.0 if cluster.device.is_cpu else size / cluster.gpus / (cluster.device.host_gbs * 1e9)
    write = size / (cluster.nodes * cluster.storage_gbs * 1e9)
    if not background:
        return InterruptionCost(copy + write, cluster.recovery_s, step)
    return InterruptionCost(copy, cluster.recovery_s, step, write)


def cost_of(plan: LayoutPlan, length: Length) -> Cost:
    """Cost of a run of this length, interruptions and checkpoints included."""
    setting, cluster = plan.setting, plan.setting.cluster
    steps = length.steps or SAMPLE_STEPS
    training = steps * plan.seconds
    saving = saving_of(setting, plan.seconds, background=length.background)
    mean = mean_between(cluster.failures_per_gpu_hour, cluster.gpus)
    best = forecast(mean, work=training, saving=saving)
    written = None
    if length.save_every is not None:
        interval = length.save_every * plan.seconds
        written = forecast(mean, work=training, saving=saving, interval=interval)
    return Cost(
        steps=steps,
        known=length.steps is not None,
        tokens=steps * tokens_per_step(setting),
        training=training,
        forecast=best,
        as_written=written,
        saving=saving,
        checkpoint=checkpoint_bytes(setting),
        price=price_of(cluster, best.seconds),
        currency=cluster.currency,
    )


def price_of(cluster: Cluster, seconds: float) -> float | None:
    """Returns the price of all nodes for this time; None if the cluster has no price, or the run does not end."""
    hourly = cluster.total_price_per_hour
    return None if hourly is None or seconds == inf else hourly * seconds / HOUR
