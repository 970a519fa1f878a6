"""Random faults, reproducible by seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stoker.resilience.fault_injection import KINDS, OF_NODES, SLOW_STEPS, Fault, Kind

FIRST = 3  # no fault before this step: surviving the start of a run is another matter
CUTS = (2.0, 4.0, 8.0)  # durations of a cut link, seconds
APART = 2  # steps between two faults, so that one is over before the next
ON_ONE_NODE = tuple(kind for kind in KINDS if kind not in OF_NODES)


def draw_faults(
    count: int,
    *,
    seed: int,
    steps: int,
    world: int,
    save_every: int,
    kinds: Sequence[Kind] = ON_ONE_NODE,
    nodes: int = 1,
) -> list[Fault]:
    """Draws ``count`` random faults, sorted by step; every kind occurs once before any kind occurs twice.

    A full disk is placed before a write, a damaged checkpoint where two exist, and a slow process only where others can
    be compared with it.

    Args:
        steps: steps of the run.
        world: number of processes.
        save_every: steps between checkpoints.
        kinds: allowed kinds.
        nodes: nodes that may be lost or cut off.

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
    """Returns the steps around a fault that must be free of others: a slow process is compared over several steps."""
    return set(range(step, step + (SLOW_STEPS if kind == "slow" else 0) + 1, APART))


def _fitting(kind: Kind, free: set[int], *, world: int, save_every: int) -> list[int]:
    """Returns the possible steps of a fault."""
    if kind == "slow" and world == 1:
        return []
    fitting = [step for step in sorted(free) if _taken(kind, step) <= free]
    if kind == "fill-disk":
        return [step for step in fitting if step % save_every in (save_every - 1, 0)]
    return [step for step in fitting if kind != "corrupt" or step > 2 * save_every]
