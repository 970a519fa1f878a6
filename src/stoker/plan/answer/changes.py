"""Changes that make a job fit: the smallest of each kind, found by searching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.device_catalogue import CATALOGUE
from stoker.plan.answer.setting_to_yaml import cluster_words, fuller_nodes
from stoker.plan.search import LayoutPlan, search
from stoker.plan.search_space import Space
from stoker.plan.setting import TrainingWork, Tuning
from stoker.plan.software import STOKER, Software

MOST_NODES = 4096  # more nodes than this are not suggested
ALL_COUNTS = 64  # nodes up to which every number is tried: those that do not divide the batch may not fit
MORE = 1.02  # times the memory, from which on a device has more
SEQ_STEP = 256  # tokens: rows are shortened to multiples of it, which context parallelism can split
LIGHTER: dict[Tuning, tuple[Tuning, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",)}


@dataclass(frozen=True)
class FittingChange:
    """A change that makes the job fit.

    Attributes:
        what: described for people.
        words: how to write it in the job or on the command line.
        factor: its size: the factor of nodes or of memory, or of shorter rows; infinite for another tuning method.
        plan: the best one with it.
    """

    what: str
    words: str
    factor: float
    plan: LayoutPlan


def changes(work: TrainingWork, cluster: Cluster, *, on: str, software: Software = STOKER) -> list[FittingChange]:
    """Returns every single change that was found to make the job fit, the smallest first.

    Args:
        on: the value of ``--on`` that selects the cluster.
    """
    found: list[FittingChange] = []
    for sort in (_batch, _nodes, _device, _shorter, _tuning):
        for what, words, factor, better, where in sort(_Asked(work, cluster, on, software)):
            best = search(better, where, software=software, kept=1).plans
            if best:
                found.append(FittingChange(what, words, factor, best[0]))
                break
    return sorted(found, key=lambda change: change.factor)


Candidate = tuple[str, str, float, TrainingWork, Cluster]


@dataclass(frozen=True)
class _Asked:
    """The job and cluster for which nothing fits."""

    work: TrainingWork
    cluster: Cluster
    on: str
    software: Software

    def fits(self, *, work: TrainingWork | None = None, cluster: Cluster | None = None) -> bool:
        """Returns whether other work or another cluster fits, by a search of the settings with the least memory."""
        work, cluster = work or self.work, cluster or self.cluster
        sparing = Space(micro_batch={1}, recompute={"none" if work.adapters.prefix else "full"})
        return bool(search(work, cluster, software=self.software, space=sparing, kept=1).plans)


def _batch(asked: _Asked) -> Iterator[Candidate]:
    """Yields the nearest divisible batch if the devices do not divide this one."""
    work, cluster = asked.work, asked.cluster
    batch, gpus = work.global_batch, cluster.gpus
    if batch % gpus == 0:
        return
    for size in sorted({batch // gpus * gpus, -(-batch // gpus) * gpus} - {0}, key=lambda size: abs(size - batch)):
        changed = work.resized(global_batch=size)
        if asked.fits(work=changed):
            yield "another batch", f"train.batch={size}", max(size / batch, batch / size), changed, cluster


def _nodes(asked: _Asked) -> Iterator[Candidate]:
    """More devices in a node that is not full, else more nodes: the least number that fits."""
    work, cluster = asked.work, asked.cluster
    if cluster.device.is_cpu:
        return
    for larger in fuller_nodes(cluster, like=asked.on):
        if asked.fits(cluster=larger):
            words = f"--on {larger.gpus}x{larger.device.name}"
            yield f"{larger.gpus} devices in a node", words, larger.gpus / cluster.gpus, work, larger
    nodes = least_number(
        lambda nodes: asked.fits(cluster=cluster.with_nodes(nodes)), above=cluster.nodes, most=MOST_NODES
    )
    if nodes is not None:
        larger = cluster.with_nodes(nodes)
        yield f"{nodes} nodes", cluster_words(larger, like=asked.on, was=cluster), nodes / cluster.nodes, work, larger


def least_number(suits: Callable[[int], bool], *, above: int, most: int) -> int | None:
    """Returns the least number above ``above`` that suits; None if none is found up to ``most``.

    The number is doubled until it suits; then every number below is tried if there are few, and a bisection is used if
    there are many, which assumes that all larger ones suit.
    """
    high = 2 * above
    while not suits(high):
        high *= 2
        if high > most:
            return None
    low = max(above, high // 2)
    if high - low <= ALL_COUNTS:
        return next((number for number in range(above + 1, high) if suits(number)), high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suits(middle) else (middle, high)
    return high


def _device(asked: _Asked) -> Iterator[Candidate]:
    """Devices of the catalogue with more memory, the least more first."""
    now = asked.cluster.device
    if now.is_cpu:
        return
    larger = [kind for kind in CATALOGUE if kind.memory_gib > now.memory_gib * MORE and not kind.is_cpu]
    for kind in sorted(larger, key=lambda kind: kind.memory_gib):
        other = replace(asked.cluster, device=kind, calibration=None, corrections=())
        if asked.fits(cluster=other):
            factor = kind.memory_gib / now.memory_gib
            yield (
                "a device with more memory",
                cluster_words(other, like=asked.on, was=asked.cluster),
                factor,
                asked.work,
                other,
            )


def _shorter(asked: _Asked) -> Iterator[Candidate]:
    """Yields the longest rows that fit, in multiples of `SEQ_STEP`."""
    work = asked.work

    def with_rows(steps: int) -> TrainingWork:
        return work.resized(seq_len=steps * SEQ_STEP)

    low, high = 0, -(-work.seq_len // SEQ_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if asked.fits(work=with_rows(middle)) else (low, middle)
    if low:
        length = low * SEQ_STEP
        yield "shorter rows", f"train.seq_len={length}", work.seq_len / length, with_rows(low), asked.cluster


def _tuning(asked: _Asked) -> Iterator[Candidate]:
    """Adapters instead of all weights, on a base in 4 bits if need be."""
    for tuning in () if "adapters" in asked.work.refused else LIGHTER.get(asked.work.tuning, ()):
        changed = replace(asked.work, tuning=tuning, quantise="none")
        if asked.fits(work=changed):
            yield "adapters instead of all weights", f"tune={tuning}", inf, changed, asked.cluster
