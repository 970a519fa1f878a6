"""Faults drawn at random, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stoker.resilience.fault_injection import KINDS, OF_NODES, SLOW_STEPS, Fault, Kind

FIRST = 3  # step before which nothing happens: what a run cannot survive at its start is another matter
CUTS = (2.0, 4.0, 8.0)  # seconds that a link is cut
APART = 2  # steps between two faults: one is over before the next
ON_ONE_NODE = tuple(kind for kind in KINDS if kind not in OF_NODES)


def draw(
    count: int,
    *,
    seed: int,
    steps: int,
    world: int,
    save_every: int,
    kinds: Sequence[Kind] = ON_ONE_NODE,
    nodes: int = 1,
) -> list[Fault]:
    """``count`` random faults in the order of their steps; every kind once before any kind twice.

    A full disk comes when something is about to be written, a damaged checkpoint when there are two, a slow process
    where others can be compared with.

    Args:
        steps: of the run.
        world: its processes.
        save_every: steps between two checkpoints.
        kinds: that may come.
        nodes: that may be lost or cut off.

    Raises:
        ValueError: the run has too few steps for them.
    """
    drawn = random.Random(seed)
    free = set(range(FIRST, steps, APART))
    faults: list[Fault] = []
    turn: list[Kind] = []
    while len(faults) < count:
        turn = turn or drawn.sample(list(kinds), len(kinds))
        kind = turn.pop()
        fitting = _fitting(kind, free, world=world, save_every=save_every)
        if fitting:
            step = drawn.choice(fitting)
            free -= _taken(kind, step)
            if kind in OF_NODES:
                seconds = drawn.choice(CUTS) if kind == "cut-link" else 0.0
                faults.append(Fault(kind, step, node=str(drawn.randrange(nodes)), seconds=seconds))
                continue
            factor = drawn.choice((2.0, 3.0, 4.0)) if kind == "slow" else 1.0
            faults.append(Fault(kind, step, 0 if kind == "nan" else drawn.randrange(world), factor))
        elif not any(_fitting(kind, free, world=world, save_every=save_every) for kind in kinds):
            raise ValueError(f"{steps} steps have room for {len(faults)} of {count} faults")
    return sorted(faults, key=lambda fault: fault.step)


def _taken(kind: Kind, step: int) -> set[int]:
    """The steps around a fault without another: a slow process is compared over some of them."""
    return set(range(step, step + (SLOW_STEPS if kind == "slow" else 0) + 1, APART))


def _fitting(kind: Kind, free: set[int], *, world: int, save_every: int) -> list[int]:
    """The steps at which a fault may come."""
    if kind == "slow" and world == 1:
        return []
    fitting = [step for step in sorted(free) if _taken(kind, step) <= free]
    if kind == "fill-disk":
        return [step for step in fitting if step % save_every in (save_every - 1, 0)]
    return [step for step in fitting if kind != "corrupt" or step > 2 * save_every]
