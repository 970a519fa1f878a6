"""The report of ``stoker plan`` on a job of task ranking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from stoker.console import Console
from stoker.models.ranking.model_inputs import FIRST_ORDER

if TYPE_CHECKING:
    from stoker.train.ranking.plan_ranking import RankingPlan

GIB, MIB, KIB = 2**30, 2**20, 2**10


def print_ranking_plan(plan: RankingPlan, where: str) -> None:
    """Prints the tables, then the needs of a process."""
    _tables(plan)
    memory, sent = plan.memory, plan.sent
    holder = "each server" if plan.served else "each process"
    held = (
        f"values and optimizer state {size(memory.rows)}, index {size(memory.index)}, counters {size(memory.counters)}"
    )
    held += f", sketches {size(memory.sketches)}" if memory.sketches else ""
    held += f"; on the disk {size(memory.file)}" if memory.file else ""
    exchanged = f"keys {size(sent.keys)}, rows {size(sent.rows)}, gradients {size(sent.gradients)}"
    words = "fits" if plan.fits else "DOES NOT FIT; use more hosts, `ranking.table.memory_rows` or `ranking.servers`"
    print(
        f"\non {where}: {plan.processes} processes, {plan.micro_batch} rows x {plan.accumulation} passes per step each"
    )
    print(f"  lookups     {plan.lookups:,} ids per pass, {plan.unique:,} of them distinct")
    print(f"  rows        {holder} holds {size(memory.total)}: {held}")
    print(f"  checkpoint  {size(plan.checkpoint)} more for each process's copies of the saved state")
    print(f"  tower       {plan.tower_parameters:,} parameters, {size(plan.tower)} with gradients and optimizer state")
    if plan.softmax:
        print(f"  softmax     {size(plan.softmax)} for the logits of all items of a step, and how often each occurs")
        exchanged += f", candidates {size(sent.candidates)}"
    print(f"  exchange    each process sends {size(sent.total)} per step: {exchanged}, tower {size(sent.tower)}")
    print(f"  servers     {plan.servers_needed} of {size(plan.host_memory)} would hold all rows")
    print(f"  memory      {size(plan.on_host)} of a host's {size(plan.host_memory)}: {words}")


def _tables(plan: RankingPlan) -> None:
    table = Table("table", "rows", "bytes a row", "size", "ids a row", *_HEADINGS, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    shown = [each for each in plan.tables if not each.name.endswith(FIRST_ORDER)]
    for each in shown:
        hot = [f"{taken:.0%}" if float(share) * each.rows >= 1 else "-" for share, taken in each.hottest.items()]
        table.add_row(each.name, f"{each.rows:,}", f"{each.row_bytes}", size(each.bytes), f"{each.lookups:.2f}", *hot)
    Console().print(table)
    if rest := [each for each in plan.tables if each not in shown]:
        print(f"plus one weight for each of these rows: {size(sum(each.bytes for each in rest))}")
    print("rows after one epoch, before all evictions except those of `max_rows`")
    print("on the right: the share of the lookups that the most frequent rows take")
    if plan.read < 1:
        print(f"ids were counted in {plan.read:.1%} of the training rows, evenly spaced; rows are extrapolated")


_HEADINGS = ("0.1 %", "1 %", "10 %", "50 %")


def size(count: float) -> str:
    """Formats a size: ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
