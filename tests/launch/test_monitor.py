"""What the supervisor sees in heartbeats: stages are not compared, the longest phases count, one process is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoker.job.blocks.faults_block import FaultsBlock
from stoker.job.layout import Layout
from stoker.launch.monitor import Watch, cause_of
from stoker.resilience.heartbeat import Pulse
from stoker.resilience.watchdog import WINDOW, Hung

PULSE = Pulse(100.0, "train", 2, 1, 1, 0.1, 0.1, 0.0, 0.0)


def watch_of(folder: Path, layout: Layout, longest: dict[str, float]) -> tuple[Watch, list[str]]:
    faults = FaultsBlock()
    spec: Any = SimpleNamespace(
        output=folder, layout=layout, loaded=SimpleNamespace(job=SimpleNamespace(faults=faults))
    )
    words: list[str] = []
    return Watch(spec, say=words.append, longest=longest), words


def slow(folder: Path, layout: Layout, own: list[float]) -> list[str]:
    """What is said of processes with these seconds of their own work a step."""
    watch, words = watch_of(folder, layout, {})
    for steps in (1, 1 + WINDOW):
        pulses = {r: PULSE._replace(done=steps, steps=steps, own=steps * each) for r, each in enumerate(own)}
        watch.hear(pulses, 100.0 + steps)
        watch.look(100.0 + steps)
    return words


def test_the_stages_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    layout = Layout(data=2, pipeline=2)
    assert slow(tmp_path, layout, [0.1, 0.1, 0.5, 0.5]) == []
    (words,) = slow(tmp_path, layout, [0.1, 0.1, 0.1, 0.5])
    assert words == "rank 3 is slow: its own work takes 5.0 times as long as the others'"


def test_the_longest_phases_of_all_starts_are_kept(tmp_path: Path) -> None:
    longest = {"save": 7.0}
    watch, _ = watch_of(tmp_path, Layout(data=2), longest)
    watch.hear({0: PULSE._replace(evaluate=40.0), 1: PULSE._replace(save=9.0)}, 100.0)
    watch.hear({0: PULSE._replace(evaluate=3.0), 1: PULSE._replace(save=1.0)}, 101.0)
    assert longest == {"rollouts": 0.0, "evaluate": 40.0, "save": 9.0}


def test_of_those_that_are_furthest_behind_the_one_that_waits_for_no_other_is_named() -> None:
    behind, ahead = Hung(0, "train", 4, 9.0), Hung(2, "optimizer", 4, 8.0)
    assert cause_of([behind, ahead], {0}) == behind  # the other is further, whatever it does
    also = Hung(1, "train", 4, 9.0)
    assert cause_of([behind, also, ahead], {0}) == also
    assert cause_of([behind, also], {0, 1}) == behind
