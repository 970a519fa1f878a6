"""Time of a pipeline's schedule in closed form, fast enough for every layout of a search.

Symbols: p processes, m micro-batches, v chunks a process; F, B and W seconds of a micro-batch's forward pass, of its
gradients of inputs, and of its gradients of weights; c seconds of a send.
`stoker.plan.pipeline.timeline` simulates the exact times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from stoker.job.layout import ScheduleName, stages_of
from stoker.plan.pipeline.schedule_order import order
from stoker.plan.pipeline.timeline import StageTime, simulate


def _wait(schedule: ScheduleName, time: StageTime) -> float:
    """Seconds that every process waits for a stage of another one to take a micro-batch both ways.

    Over the p - 1 others this is the bubble of even stages: (p - 1)(F + B + W) for GPipe and 1F1B (Narayanan et al.,
    2021, section 2.2.1), over v for the interleaved order (section 2.2.2); (p - 1)(F + B - W) for zero bubble (Qi et
    al., 2023, table 2), and no less than (p - 1) max(F, B), when gradients of weights take longer than the wait that
    they fill; half of (p - 1) max(F, B, 2 (B - W)) for ZB-V, derived for PyTorch's order, which alternates whole
    backward passes, and within 6 % of the step where B is less than F or W.
    """
    if schedule == "zbv":
        return max(time.forward, time.backward_input, 2 * (time.backward_input - time.backward_weight))
    if schedule == "zero-bubble":
        whole = time.forward + time.backward_input
        return max(time.forward, time.backward_input, whole - time.backward_weight)
    return time.total


def step_seconds(
    schedule: ScheduleName, times: Sequence[StageTime], *, processes: int, micro_batches: int, send: float = 0.0
) -> float:
    """Seconds of a step's forward and backward passes, stages of any times.

    Exact for even stages without sends (see `_wait` for ZB-V), and for GPipe always. Otherwise, for stages that
    differ by up to 30 % either way and sends of up to a tenth of a forward pass, 1F1B is within 1 % of the simulated
    time without sends and 3 % with them; the looped schedules are within 12 %, and from four micro-batches a process
    on within 8 %, on the mean within 5 % and 2.5 %. Tested in tests/plan/pipeline/test_bubble.py.

    Sends cost 1F1B most: a stage has no more micro-batches in flight than a round trip without sends needs, so that
    each micro-batch waits for 2 c (p - 1) / p. The other schedules have some to spare and wait for sends while they
    fill and drain only.

    Args:
        times: of each of the p v stages, first to last.
        send: seconds from a process to another, each way.
    """
    if processes == 1 and schedule != "zbv":
        return micro_batches * sum(time.total for time in times)
    if schedule == "gpipe":
        return _gpipe_seconds(times, micro_batches) + 2 * (processes - 1) * send
    if schedule == "1f1b":
        return _1f1b_seconds(times, micro_batches, send)
    least = 2 * processes - 1 if schedule == "zbv" else processes
    if micro_batches < least:  # the pipeline is never full
        chunks = len(times) // processes
        made = order(schedule, processes=processes, micro_batches=micro_batches, chunks=chunks)
        return simulate(made, times, send=send).seconds
    return (
        _looped_seconds(schedule, times, processes, micro_batches)
        + _looped_sends(schedule, processes, len(times) // processes) * send
    )


def _gpipe_seconds(times: Sequence[StageTime], micro_batches: int) -> float:
    """Returns the seconds of GPipe: all stages once, and the slowest for the other micro-batches."""
    slowest = max(time.forward for time in times) + max(time.backward for time in times)
    return sum(time.total for time in times) + (micro_batches - 1) * slowest


def _1f1b_seconds(times: Sequence[StageTime], micro_batches: int, send: float) -> float:
    """Returns the seconds of 1F1B: the longest chain of actions, each of which waits for the one before.

    The chain comes down to a stage i, takes its micro-batches in turn there, and leaves again. Before the first
    gradient is back, n = p - i forward passes have been run: the longest part is either these, or the way of the first
    micro-batch through all later stages and back; likewise at the end, backward. The largest over all i leaves out only
    chains that turn elsewhere than there or at the last stage.

    With sends, a steady state cycles between stages i and j with j - i + 1 micro-batches: the slowest such
    cycle gives the time of a micro-batch.
    """
    count, m = len(times), micro_batches
    totals = np.array([time.total for time in times])
    later = totals[::-1].cumsum()[::-1]  # of this stage and those after it
    longest = 0.0
    for at, time in enumerate(times):
        held = min(count - at, m)
        if held == m:  # all forward passes come before the first backward pass
            whole = max(m * time.forward + time.backward, later[at]) + (m - 1) * time.backward
            longest = max(longest, float(later[0] - later[at] + whole))
            continue
        first = max(held * time.forward + time.backward, later[at])
        last = max(time.forward + held * time.backward, later[at])
        chain = (later[0] - later[at]) + first + (m - 1 - held) * time.total + last
        longest = max(longest, float(chain))
    if not send:
        return longest
    until = np.concatenate([[0.0], totals.cumsum()])
    stages = np.arange(count)
    hops = stages[None, :] - stages[:, None]  # from stage i (row) to stage j (column)
    rounds = (until[None, 1:] - until[:-1, None] + 2 * send * hops) / np.where(hops < 0, 1, hops + 1)
    slowest = float(rounds[hops >= 0].max())
    waits = (m - 1) * (slowest - float(totals.max())) + 2 * send * (count - 2 + (count - 1) / count)
    return longest + max(2 * send * (count - 1), waits)


def _looped_seconds(schedule: ScheduleName, times: Sequence[StageTime], processes: int, micro_batches: int) -> float:
    """Returns the maximum over processes of a process' own work and its waits for the others.

    It waits for those before it where a micro-batch first comes down to its first stage, and for those after it
    where it comes to its last.
    """
    chunks, total = len(times) // processes, [time.total for time in times]
    homes = [stages_of(schedule, process=at, processes=processes, stages_per_process=chunks) for at in range(processes)]
    work = [sum(total[stage] for stage in stages) for stages in homes]
    if schedule == "zbv":
        waits = [(_wait(schedule, times[a]) + _wait(schedule, times[b])) / 2 for a, b in homes]
        return max(micro_batches * own + sum(waits) - wait for own, wait in zip(work, waits, strict=True))
    before = [0.0, *accumulate(_wait(schedule, times[stages[0]]) for stages in homes)]
    after = [0.0, *accumulate(_wait(schedule, times[stages[-1]]) for stages in reversed(homes))]
    return max(before[at] + micro_batches * work[at] + after[processes - 1 - at] for at in range(processes))


def _looped_sends(schedule: ScheduleName, processes: int, chunks: int) -> int:
    """Returns the number of sends that a step with even stages waits for while it fills and drains.

    With interleaved 1F1B these are the sends through all stages and back. The other two schedules hide some sends; for
    them it is the largest number that simulated steps wait for.
    """
    p = processes
    if schedule == "interleaved":
        return 2 * (chunks * p - 1)
    if schedule == "zero-bubble":
        return 4 * (p - 1) if chunks == 1 else 5 * p - 4
    return max(5 * p - 7, 0)
