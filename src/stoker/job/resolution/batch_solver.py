"""The batch triangle: global batch = micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.job.block import LARGEST
from stoker.job.layout import Layout

DEFAULT_BATCH = 8
TOKENS_PER_PASS = 8192  # default limit of a process's forward pass; fills small devices well


@dataclass(frozen=True)
class BatchTriangle:
    """A solved triangle, in sequences; ``batch == micro_batch * accumulation * data_parallel``."""

    batch: int
    micro_batch: int
    accumulation: int
    data_parallel: int


class BatchError(ValueError):
    """The corners are at odds: ``message`` names the numbers, ``suggestion`` the nearest that work."""

    def __init__(self, message: str, suggestion: str) -> None:
        self.message, self.suggestion = message, suggestion
        super().__init__(f"{message}; {suggestion}")


def solve_batch(
    *,
    batch: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    data_parallel: int | None,
    seq_len: int | None,
    default_batch: int,
    pipeline: Layout,
    samples: int | None,
) -> BatchTriangle:
    """Solves the triangle from the given corners; None marks a corner to solve for. All are at least 1.

    Defaults where the corners leave a choice: one data-parallel process; no accumulation when only the micro-batch is
    given; ``default_batch`` sequences (at least one per process and pass) when no corner decides it; and the
    largest micro-batch that divides the work of a process and holds at most TOKENS_PER_PASS tokens (no limit
    where ``seq_len`` is None).

    The micro-batches of a ``pipeline`` are the forward passes of a step: where there is a choice there are at
    least as many as stages, which keeps every stage busy, or else as many as possible.

    ``samples`` are taken in whole steps: only batches that divide them are proposed.

    Raises BatchError where no whole numbers satisfy the corners and the pipeline's schedule.
    """
    if data_parallel is None:
        data_parallel = 1
        if batch is not None and micro_batch is not None and accumulation is not None:
            _need_multiple(batch, samples, micro_batch=micro_batch, accumulation=accumulation)
            data_parallel = batch // (micro_batch * accumulation)
    if batch is None:
        batch = _batch_from(micro_batch, accumulation, data_parallel, default_batch, pipeline)
    if batch > LARGEST:
        raise BatchError(f"a step would take {batch} sequences", f"write numbers whose product is at most {LARGEST}")
    if micro_batch is not None and accumulation is not None:
        product = micro_batch * accumulation * data_parallel
        if product != batch:
            parts = f"micro_batch {micro_batch} x accumulation {accumulation} x data-parallel {data_parallel}"
            raise BatchError(
                f"{parts} is {product}, but batch is {batch}",
                f"write batch {product}, or give two of the three",
            )
    elif micro_batch is not None:
        _need_multiple(batch, samples, micro_batch=micro_batch, data_parallel=data_parallel)
        accumulation = batch // (micro_batch * data_parallel)
    elif accumulation is not None:
        _need_multiple(batch, samples, accumulation=accumulation, data_parallel=data_parallel)
        micro_batch = batch // (accumulation * data_parallel)
    else:
        _need_multiple(batch, samples, data_parallel=data_parallel)
        share = batch // data_parallel
        accumulation = _passes(share, share if seq_len is None else max(1, TOKENS_PER_PASS // seq_len), pipeline)
        micro_batch = share // accumulation
    solved = BatchTriangle(batch, micro_batch, accumulation, data_parallel)
    if not pipeline.takes(accumulation):
        raise _out_of_step(solved, pipeline)
    return solved


def _passes(share: int, limit: int, pipeline: Layout) -> int:
    """Returns the fewest forward passes that keep every stage busy, each of at most ``limit`` sequences."""
    possible = [share // size for size in divisors(share) if size <= limit and pipeline.takes(share // size)]
    return min((count for count in possible if count >= pipeline.stage_count), default=max(possible, default=share))


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _batch_from(
    micro_batch: int | None, accumulation: int | None, data_parallel: int, default_batch: int, pipeline: Layout
) -> int:
    if micro_batch is not None:
        return micro_batch * (accumulation or pipeline.stage_count) * data_parallel
    unit = (accumulation or (1 if pipeline.takes(1) else pipeline.pipeline)) * data_parallel
    return max(unit, default_batch // unit * unit)


def _out_of_step(solved: BatchTriangle, pipeline: Layout) -> BatchError:
    """Returns the error of a number of micro-batches that the schedule cannot run, with numbers that it can."""
    over = f"`schedule: {pipeline.schedule}` over {pipeline.pipeline} processes"
    needs = (
        f"needs at least {pipeline.pipeline} micro-batches a step"
        if pipeline.schedule == "1f1b"
        else f"runs its micro-batches in equal rounds of {pipeline.pipeline} or more"
    )
    share = solved.micro_batch * solved.accumulation
    fitting = sorted(filter(pipeline.takes, divisors(share)), key=lambda count: abs(count - solved.accumulation))[:2]
    options = [f"accumulation {count} with micro_batch {share // count}" for count in sorted(fitting)]
    if not options:
        least = (share // pipeline.pipeline + 1) * pipeline.pipeline
        options = [f"batch {least * solved.data_parallel} with accumulation {least}"]
    return BatchError(
        f"{over} {needs}, and accumulation is {solved.accumulation}",
        f"write {', or '.join([*options, '`schedule: gpipe`'])}",
    )


def _need_multiple(batch: int, samples: int | None, **corners: int) -> None:
    """Raise unless the batch is a multiple of the corners' product; name the nearest numbers that do, and batches that
    divide ``samples``.
    """
    product = 1
    for value in corners.values():
        product *= value
    if batch % product == 0:
        return
    names = {name: name.replace("data_parallel", "data-parallel") for name in corners}
    parts = " x ".join(f"{names[name]} {value}" for name, value in corners.items())
    below, above = batch // product * product, (batch // product + 1) * product
    batches = [str(each) for each in (below, above) if each and (samples is None or samples % each == 0)]
    options = [f"batch {' or '.join(batches)}"] if batches else []
    for name, value in corners.items():
        rest = product // value
        if batch % rest == 0 and value > 1:
            near = sorted(sorted(divisors(batch // rest), key=lambda d, value=value: abs(d - value))[:2])  # type: ignore[misc]
            options.append(f"{names[name]} {' or '.join(map(str, near))}")
    equals = f" = {product}" if len(corners) > 1 else ""
    message = f"batch {batch} is not a multiple of {parts}{equals}"
    raise BatchError(message, f"write {', or '.join(options)}" if options else "write smaller numbers")
