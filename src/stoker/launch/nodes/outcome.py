"""The outcome of a run, in the form that the leader sends to the other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stoker.errors import Interrupted, Problem, UserError
from stoker.launch.first_failure import USER_ERRORS, RankFailed
from stoker.train.run_result import RunResult

Outcome = RunResult | UserError | Interrupted
KINDS: Mapping[str, type[UserError]] = {**USER_ERRORS, "RankFailed": RankFailed}


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as the values of a message."""
    if isinstance(outcome, RunResult):
        return {"result": asdict(outcome)}
    if isinstance(outcome, Interrupted):
        return {"signal": outcome.number, "keeps": outcome.keeps}
    name = next((name for name, kind in KINDS.items() if type(outcome) is kind), "UserError")
    notes = list(getattr(outcome, "__notes__", ()))
    return {"error": name, "problems": [asdict(problem) for problem in outcome.problems], "notes": notes}


def outcome_of(values: Mapping[str, Any]) -> Outcome:
    """Restores an outcome from the output of `outcome_to_json`."""
    if "result" in values:
        return RunResult(**values["result"])
    if "signal" in values:
        return Interrupted(int(values["signal"]), keeps=values.get("keeps") is True)
    error = KINDS[values["error"]](*(Problem(**problem) for problem in values["problems"]))
    for note in values["notes"]:
        error.add_note(note)
    return error
