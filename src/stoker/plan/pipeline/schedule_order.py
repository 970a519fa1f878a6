"""The order of actions of each process under a pipeline schedule.

The orders are those of the schedules that `stoker.parallel.pipeline` runs, action by action: GPipe (Huang et al.,
2019), 1F1B (Narayanan et al., 2019, PipeDream-Flush), interleaved 1F1B (Narayanan et al., 2021, section 2.2.2), zero
bubble (Qi et al., 2023, ZB-H1, looped over several stages a process) and its V form (Qi et al., 2024, section 3,
ZB-V). Backward passes go through micro-batches in the order of the forward passes in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from stoker.job.layout import LOOPED, ScheduleName, stages_of

Kind = Literal["forward", "backward", "input", "weight"]
ChunkPass = tuple[Kind, int]  # the kind of pass, and the index of the process' chunk
DOWN: ChunkPass = ("forward", 0)  # the only chunk, or the one of the downward branch of a V
DOWN_BACKWARD: ChunkPass = ("backward", 0)
DOWN_SPLIT: tuple[ChunkPass, ...] = (("input", 0), ("weight", 0))
UP: ChunkPass = ("forward", 1)
UP_SPLIT: tuple[ChunkPass, ...] = (("input", 1), ("weight", 1))


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    Attributes:
        kind: ``forward``; ``backward`` for all gradients at once; ``input`` for those of the stage's input, which the
            stage before waits for; ``weight`` for those of the weights, which no other stage waits for.
        stage: counted from 0 over the whole pipeline.
        micro_batch: counted from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int


Order = tuple[tuple[Action, ...], ...]


def chunks_of(schedule: ScheduleName) -> int:
    """Stages that a process has where Stoker trains with the schedule."""
    return 2 if schedule in LOOPED else 1


def round_size(processes: int, micro_batches: int) -> int:
    """Micro-batches that looped schedules take through a chunk before they go to the next: at least as many as there
    are processes, if the step has that many."""
    return micro_batches // max(1, micro_batches // processes)


@lru_cache(maxsize=64)
def order(schedule: ScheduleName, *, processes: int, micro_batches: int, chunks: int | None = None) -> Order:
    """Returns the actions of each process, in order.

    Args:
        chunks: stages of each process; by default Stoker's number. GPipe and 1F1B take one, ZB-V two.

    Raises:
        ValueError: the schedule cannot run this number of micro-batches or chunks.
    """
    chunks = chunks or chunks_of(schedule)
    if schedule not in ("interleaved", "zero-bubble") and chunks != chunks_of(schedule):
        raise ValueError(f"{schedule} takes {chunks_of(schedule)} stages a process, not {chunks}")
    if schedule in ("interleaved", "zero-bubble") and micro_batches % round_size(processes, micro_batches):
        raise ValueError(f"{schedule} runs equal rounds; {micro_batches} micro-batches over {processes} do not divide")
    make: Callable[[int], Iterable[ChunkPass]] = {
        "gpipe": lambda at: _gpipe(micro_batches),
        "1f1b": lambda at: _one_forward_one_backward(processes - 1 - at, micro_batches),
        "interleaved": lambda at: _looped(at, processes, micro_batches, chunks, split=False),
        "zero-bubble": lambda at: _looped(at, processes, micro_batches, chunks, split=True),
        "zbv": lambda at: _v(at, processes, micro_batches),
    }[schedule]
    return tuple(
        _numbered(
            make(at), stages_of(schedule, process=at, processes=processes, stages_per_process=chunks), micro_batches
        )
        for at in range(processes)
    )


def _numbered(kinds: Iterable[ChunkPass], stages: Sequence[int], micro_batches: int) -> tuple[Action, ...]:
    """Actions of (kind, chunk)s: every chunk passes its micro-batches in order, so that counting them names them."""
    passed: Counter[ChunkPass] = Counter()
    actions = []
    for kind, chunk in kinds:
        actions.append(Action(kind, stages[chunk], passed[kind, chunk]))
        passed[kind, chunk] += 1
    return tuple(action for action in actions if action.micro_batch < micro_batches)


def _gpipe(micro_batches: int) -> Iterable[ChunkPass]:
    yield from [DOWN] * micro_batches
    yield from [DOWN_BACKWARD] * micro_batches


def _one_forward_one_backward(later: int, micro_batches: int) -> Iterable[ChunkPass]:
    """Yields 1F1B's order: the ``later`` stages each take a micro-batch before the first gradient arrives."""
    ahead = min(later, micro_batches)
    yield from [DOWN] * ahead
    yield from [DOWN, DOWN_BACKWARD] * (micro_batches - ahead)
    yield from [DOWN_BACKWARD] * ahead


def ahead_of(process: int, *, processes: int, micro_batches: int, chunks: int, split: bool) -> int:
    """Forward passes of a looped schedule before a process alternates: a round through each chunk but the last, and
    one (where weights' gradients can fill the wait; else two) for each process after it."""
    steps = (1 if split else 2) * (processes - 1 - process)
    return min((chunks - 1) * round_size(processes, micro_batches) + steps, chunks * micro_batches)


def _looped(process: int, processes: int, micro_batches: int, chunks: int, *, split: bool) -> Iterable[ChunkPass]:
    """Interleaved 1F1B, and with split backward passes the looped zero bubble.

    The gradients of weights are put off by as many micro-batches as there are processes before this one, so that the
    last process, which is the first to go back, does not run out of work at the end.
    """
    size, passes = round_size(processes, micro_batches), chunks * micro_batches
    ahead = ahead_of(process, processes=processes, micro_batches=micro_batches, chunks=chunks, split=split)
    for step in range(passes + ahead):
        if step < passes:
            yield "forward", step // size % chunks
        done = step - ahead
        if done >= 0:
            yield "input" if split else "backward", chunks - 1 - done // size % chunks
            if split and done >= process:
                yield "weight", chunks - 1 - (done - process) // size % chunks
    for done in range(passes - min(process, passes), passes) if split else ():
        yield "weight", chunks - 1 - done // size % chunks


def _v(process: int, processes: int, micro_batches: int) -> Iterable[ChunkPass]:
    """ZB-V: a process' first chunk leads down the V, its second up again.

    Made for at least 2 x processes - 1 micro-batches, which fill the V; with fewer, those that do not exist are left
    out.
    """
    total, later = max(2 * processes - 1, micro_batches), processes - process
    yield from [DOWN] * (2 * later - 1)
    yield from [UP, DOWN] * process
    yield from [UP, *UP_SPLIT] * later
    for step in range(total - processes):
        if step < total - (processes + later - 1):
            yield DOWN
        yield from [*DOWN_SPLIT, UP, *UP_SPLIT]
    yield from [DOWN_SPLIT[0], UP_SPLIT[0]] * process
    yield from DOWN_SPLIT * later
    yield from [UP_SPLIT[1]] * process
    yield from [DOWN_SPLIT[1]] * process


def in_flight(
    schedule: ScheduleName, *, processes: int, micro_batches: int, chunks: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the peak number of micro-batches whose activations each process saves, for each of its chunks.

    From the forward pass to the end of the backward pass, that of the weights where it is split. The sums over the
    chunks are: all micro-batches m for GPipe; min(m, p - i) at stage i for 1F1B (Narayanan et al., 2021, section
    2.2.1); for interleaved 1F1B p v + p - 1 chunks on the first process, 1 + (p - 1) / (p v) times that of
    1F1B; p v on every process for zero bubble, the same as 1F1B's first; 2 p for ZB-V.
    """
    chunks, p, m = chunks or chunks_of(schedule), processes, micro_batches
    if schedule == "gpipe":
        return ((m,),) * p
    if schedule == "1f1b":
        return tuple((min(m, p - at),) for at in range(p))
    if schedule == "zbv":
        return tuple((min(m, 2 * p - 1 - at), min(m, at + 1)) for at in range(p))
    split, size = schedule == "zero-bubble", round_size(p, m)
    kept = []
    for at in range(p):
        ahead = ahead_of(at, processes=p, micro_batches=m, chunks=chunks, split=split)
        passes = min(ahead + 1 + (at if split else 0), chunks * m)  # forward passes before the first is freed
        rounds, rest = divmod(passes, size * chunks)
        kept.append(tuple(rounds * size + min(max(rest - chunk * size, 0), size) for chunk in range(chunks)))
    return tuple(kept)
