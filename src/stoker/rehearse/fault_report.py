"""Effects of injected faults, from the run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.resilience.fault_injection import Fault, Kind
from stoker.runs.json_lines import read_lines
from stoker.runs.run_folder import RunFolder

# The events by which a run notices a fault.
NOTICED: Mapping[Kind, tuple[str, ...]] = {
    "kill": ("fault", "failed"),
    "hang": ("hung",),
    "slow": ("slow",),
    "nan": ("not_finite",),
    "corrupt": ("damaged",),
    "fill-disk": ("save_failed",),
    "kill-node": ("node_lost",),
    "cut-link": ("node_lost", "fault"),
}
NOTICED_BY_RANK: tuple[Kind, ...] = ("kill", "hang", "slow")  # only by an event of the fault's rank
RESTARTED: tuple[Kind, ...] = ("kill", "hang", "corrupt", "kill-node", "cut-link")  # kinds that restart the processes


@dataclass(frozen=True)
class FaultEffect:
    """Effect of one fault.

    Attributes:
        happened: whether it occurred; the run may have ended before.
        noticed: the event that shows it was noticed; None if nothing depended on it.
        after: seconds until it was noticed.
        lost: steps that were repeated.
        recovery: seconds until the next step was done, if the processes were restarted.
        rank: rank that the event names, if any.
    """

    fault: Fault
    happened: bool
    noticed: str | None = None
    after: float | None = None
    lost: int = 0
    recovery: float | None = None
    rank: int | None = None

    def describe(self) -> str:
        """Formats the effect: ``kill 1@7: noticed after 0.3 s (fault), no step lost, training again after 4.1 s``."""
        if not self.happened:
            return f"{self.fault}: did not happen"
        words = ["not noticed: nothing depended on it"]
        if self.noticed is not None:
            named = f", rank {self.rank}" if self.rank is not None else ""
            words = [f"noticed after {self.after:.1f} s ({self.noticed}{named})"]
        if self.fault.kind in RESTARTED:
            words.append(f"{self.lost or 'no'} step{'s' * (self.lost > 1)} lost")
        if self.recovery is not None:
            words.append(f"training again after {self.recovery:.1f} s")
        return f"{self.fault}: {', '.join(words)}"


def fault_effects(folder: RunFolder, faults: Sequence[Fault]) -> list[FaultEffect]:
    """Returns the effect of each fault."""
    events = folder.read_events()
    lines = sorted(
        [*folder.read_metrics(), *read_lines(folder.repeated)], key=lambda line: float(line.get("time", 0.0))
    )
    return [_effect(number, fault, events, lines) for number, fault in enumerate(faults)]


def _effect(
    number: int, fault: Fault, events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> FaultEffect:
    mine = next((n for n, e in enumerate(events) if e["event"] == "chaos" and e["number"] == number), None)
    if mine is None:
        return FaultEffect(fault, happened=False)
    fault = replace(fault, step=events[mine]["step"])  # a checkpoint may be corrupted later than asked
    begin, since = events[mine]["time"], events[mine + 1 :]
    notice = _notice(since, fault)
    resumed = again = None
    if fault.kind in RESTARTED:
        resumed = next((e for e in since if e["event"] in ("resumed", "started")), None)
        again = next((line["time"] for line in lines if resumed and line["time"] >= resumed["time"]), None)
    return FaultEffect(
        fault,
        happened=True,
        noticed=notice["event"] if notice else None,
        after=notice["time"] - begin if notice else None,
        lost=fault.step - 1 - resumed.get("step", 0) if resumed else 0,
        recovery=again - begin if again is not None else None,
        rank=notice.get("rank") if notice else None,
    )


def _notice(events: Sequence[Mapping[str, Any]], fault: Fault) -> Mapping[str, Any] | None:
    """Returns the first event that shows that a fault was noticed, if it is before the next fault of this kind."""
    for event in events:
        if event["event"] == "chaos" and event.get("kind") == fault.kind:
            return None
        if event["event"] in NOTICED[fault.kind] and (
            fault.kind not in NOTICED_BY_RANK or event.get("rank", fault.rank) == fault.rank
        ):
            return event
    return None
