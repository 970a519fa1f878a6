"""The report of each fault, from the records of a run whose times are known."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.rehearse.fault_report import fault_effects
from stoker.resilience.fault_injection import Fault
from stoker.runs.run_folder import RunFolder

FAULTS = [Fault("kill", 6, 1), Fault("nan", 9), Fault("slow", 12, 0, 3.0), Fault("hang", 30), Fault("fill-disk", 8)]
FAULTS += [Fault("fill-disk", 20), Fault("cut-link", 21, node="1", seconds=2.0), Fault("corrupt", 22)]
EVENTS = [
    {"time": 100.0, "event": "started", "step": 0},
    {"time": 110.0, "event": "chaos", "number": 0, "step": 6},
    {"time": 110.5, "event": "fault", "rank": 1},
    {"time": 113.0, "event": "resumed", "step": 3},
    {"time": 120.0, "event": "chaos", "number": 1, "step": 9},
    {"time": 120.2, "event": "not_finite", "step": 9},
    {"time": 130.0, "event": "chaos", "number": 2, "step": 12},
    {"time": 131.0, "event": "slow", "rank": 1},
    {"time": 133.0, "event": "slow", "rank": 0},
    {"time": 140.0, "event": "chaos", "number": 4, "kind": "fill-disk", "step": 8},
    {"time": 150.0, "event": "chaos", "number": 5, "kind": "fill-disk", "step": 20},  # the first ends here
    {"time": 151.0, "event": "save_failed", "step": 20},
    {"time": 160.0, "event": "chaos", "number": 7, "kind": "corrupt", "step": 26},  # once there were two checkpoints
    {"time": 162.0, "event": "damaged", "step": 25},
    {"time": 163.0, "event": "resumed", "step": 20},
]
LINES = [{"step": step, "time": at} for step, at in ((5, 109.0), (4, 114.5), (5, 115.0))]


def test_effects(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert [effect.describe() for effect in fault_effects(folder, FAULTS)] == [
        "kill 1@6: noticed after 0.5 s (fault, rank 1), 2 steps lost, training again after 4.5 s",
        "nan 0@9: noticed after 0.2 s (not_finite)",
        "slow 0@12:3: noticed after 3.0 s (slow, rank 0)",
        "hang 0@30: did not happen",
        "fill-disk 0@8: not noticed: nothing depended on it",
        "fill-disk 0@20: noticed after 1.0 s (save_failed)",
        "cut-link 1@21:2: did not happen",
        "corrupt 0@26: noticed after 2.0 s (damaged), 5 steps lost",
    ]
