"""The orders of the pipeline schedules, against those that torch.distributed.pipelining runs."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from stoker.job.layout import ScheduleName
from stoker.plan.pipeline.schedule_order import Action, Kind, Order, in_flight, order, round_size

LETTERS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def theirs(schedule: ScheduleName, processes: int, micro_batches: int, chunks: int) -> Order:
    """The order of torch's own class, whose methods are called without the processes that it wants."""
    if schedule in ("gpipe", "1f1b"):
        kind = peer.ScheduleGPipe if schedule == "gpipe" else peer.Schedule1F1B
        return tuple(recorded(kind, stage, processes, micro_batches) for stage in range(processes))
    kind = {
        "interleaved": peer.ScheduleInterleaved1F1B,
        "zero-bubble": peer.ScheduleInterleavedZeroBubble,
        "zbv": peer.ScheduleZBVZeroBubble,
    }[schedule]
    made = SimpleNamespace(
        pp_group_size=processes,
        num_stages=processes * chunks,
        n_local_stages=chunks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // processes),
    )
    ranks = [kind._calculate_single_rank_operations(made, at) for at in range(processes)]  # type: ignore[attr-defined]
    return tuple(tuple(action(found) for found in rank if found is not None) for rank in ranks)


def recorded(kind: type[Any], stage: int, processes: int, micro_batches: int) -> tuple[Action, ...]:
    """What torch's loop of a stage runs, on a stage that sends nothing and only notes it."""
    ran: list[Action] = []

    def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    noted = SimpleNamespace(
        stage_index=stage,
        forward_one_chunk=lambda at, *_, **__: ran.append(Action("forward", stage, at)),
        backward_one_chunk=lambda at, **_: ran.append(Action("backward", stage, at)),
        perform_reduce_grad=nothing,
        **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), nothing),
    )
    made = SimpleNamespace(
        _stage=noted,
        _n_microbatches=micro_batches,
        _num_stages=processes,
        _check_inputs=lambda *_: ([()] * micro_batches, [{}] * micro_batches),
        scale_grads=False,
        **dict.fromkeys(("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"), nothing),
    )
    kind._step_microbatches(made)
    return tuple(ran)


def action(found: Any) -> Action:
    return Action(LETTERS[found.computation_type.value], found.stage_index, found.microbatch_index)


SIZES = [(2, 2), (2, 3), (2, 8), (3, 5), (4, 4), (4, 8), (4, 10), (4, 16), (8, 8), (8, 24), (8, 64)]


@pytest.mark.parametrize("processes, micro_batches", SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_the_order_is_that_of_torch(schedule: ScheduleName, processes: int, micro_batches: int) -> None:
    for chunks in {"gpipe": [1], "1f1b": [1], "zbv": [2]}.get(schedule, [1, 2, 3, 4]):
        mine = order(schedule, processes=processes, micro_batches=micro_batches, chunks=chunks)
        assert mine == theirs(schedule, processes, micro_batches, chunks)


@pytest.mark.parametrize("schedule, processes, micro_batches", [("interleaved", 4, 3), ("zbv", 4, 3), ("zbv", 8, 9)])
def test_the_order_is_that_of_torch_when_micro_batches_do_not_fill_it(
    schedule: ScheduleName, processes: int, micro_batches: int
) -> None:
    assert order(schedule, processes=processes, micro_batches=micro_batches) == theirs(
        schedule, processes, micro_batches, 2
    )


def test_what_a_schedule_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="equal rounds"):
        order("interleaved", processes=4, micro_batches=9)
    with pytest.raises(ValueError, match="takes 1 stages"):
        order("1f1b", processes=4, micro_batches=8, chunks=2)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_what_is_kept_is_what_torchs_order_keeps(schedule: ScheduleName, processes: int) -> None:
    """Counted along the order: a forward pass adds one, the last part of a backward pass takes one away."""
    for micro_batches in (1, 2, 3, 5, 8, 12, 16, 64):
        for chunks in {"gpipe": [1], "1f1b": [1], "zbv": [2]}.get(schedule, [1, 2, 4]):
            if schedule in ("interleaved", "zero-bubble") and micro_batches % round_size(processes, micro_batches):
                continue
            if schedule == "1f1b" and micro_batches < processes:
                continue  # refused by torch
            counted = [most_kept(rank) for rank in theirs(schedule, processes, micro_batches, chunks)]
            stated = in_flight(schedule, processes=processes, micro_batches=micro_batches, chunks=chunks)
            assert [sum(of_chunks) for of_chunks in stated] == counted


def most_kept(actions: tuple[Action, ...]) -> int:
    change = {"forward": 1, "backward": -1, "input": 0, "weight": -1}
    return max(accumulate(change[action.kind] for action in actions))


@pytest.mark.parametrize("processes, chunks", [(4, 2), (8, 2), (8, 4)])
def test_interleaving_keeps_the_published_factor_more(processes: int, chunks: int) -> None:
    """Korthikanti et al., 2022, section 4.2.3: 1 + (p - 1) / (p v) times the activations of 1F1B's first stage."""
    kept = in_flight("interleaved", processes=processes, micro_batches=4 * processes, chunks=chunks)
    assert sum(kept[0]) / chunks == pytest.approx(processes * (1 + (processes - 1) / (processes * chunks)))


def test_zero_bubble_keeps_what_1f1b_keeps_at_most() -> None:
    for schedule in ("zero-bubble", "zbv"):
        kept = in_flight(schedule, processes=8, micro_batches=32)  # type: ignore[arg-type]
        assert [sum(of_chunks) / 2 for of_chunks in kept] == [8] * 8
