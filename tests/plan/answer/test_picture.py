"""The pictures of a plan: parsed again, their bars as long as the numbers, their words apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from stoker.plan.answer.picture import (
    LEFT,
    LETTER,
    PLOT,
    StageMemory,
    most_frequent_action,
    plan_svg,
    ticks,
)
from stoker.plan.answer.terminal_picture import memory_text, timeline_text
from stoker.plan.pipeline.schedule_order import order
from stoker.plan.pipeline.timeline import StageTime, Timeline, simulate

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"
STAGES = [
    StageMemory("stage 0 <embedding & blocks 0-19>", {"weights": 20 * GIB, "activations": 30 * GIB}, 58 * GIB),
    StageMemory("stage 1", {"weights": 18 * GIB, "activations": 15 * GIB, "logits": 0.1 * GIB}, 36 * GIB),
]


def step(micro_batches: int = 4, processes: int = 2) -> Timeline:
    made = order("zero-bubble", processes=processes, micro_batches=micro_batches)
    return simulate(made, [StageTime(0.010, 0.012, 0.008)] * (2 * processes), send=0.001)


def drawn(timeline: Timeline, after: Mapping[str, float] | None = None) -> str:
    return plan_svg(STAGES, timeline, capacity=80 * GIB, after=after or {}, title="A model on a cluster")


def bars(svg: str) -> tuple[list[ElementTree.Element], list[ElementTree.Element]]:
    """Returns the bars with a tooltip: those of the memory, then those of the step."""
    found = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    components = sum(len(stage.components) for stage in STAGES)
    return found[:components], found[components:]


def test_bars_of_memory_are_as_long_as_their_sizes() -> None:
    svg = drawn(step())
    found, _ = bars(svg)
    sizes = [size for stage in STAGES for size in stage.components.values()]
    scale = float(found[0].attrib["width"]) / sizes[0]
    assert [float(bar.attrib["width"]) for bar in found] == pytest.approx([size * scale for size in sizes], abs=1e-3)
    assert float(found[1].attrib["x"]) == pytest.approx(LEFT + sizes[0] * scale, abs=2e-3)  # stacked
    assert found[0].attrib["fill"] == found[2].attrib["fill"] != found[1].attrib["fill"]  # one colour a component
    page = ElementTree.fromstring(svg)
    (limit,) = [line for line in page.iter(f"{SVG}line") if line.attrib["class"] == "limit"]
    assert float(limit.attrib["x1"]) - LEFT == pytest.approx(80 * GIB * scale, abs=0.01)
    bounds = [float(r.attrib["width"]) for r in page.iter(f"{SVG}rect") if r.attrib.get("class") == "bound"]
    assert bounds == pytest.approx([58 * GIB * scale, 36 * GIB * scale], abs=1e-3)


def test_bars_of_a_step_are_as_long_as_their_times() -> None:
    timeline = step()
    _, found = bars(drawn(timeline))
    spans = [span for process in timeline.processes for span in process]
    scale = PLOT / timeline.seconds
    assert [float(bar.attrib["x"]) - LEFT for bar in found] == pytest.approx([s.start * scale for s in spans], abs=1e-3)
    assert [float(bar.attrib["width"]) for bar in found] == pytest.approx(
        [(s.end - s.start) * scale for s in spans], abs=1e-3
    )


def test_what_follows_the_passes_is_as_long_as_it_takes() -> None:
    timeline, after = step(), {"data parallel": 0.02, "optimizer": 0.005}
    _, found = bars(drawn(timeline, after))
    spans = sum(map(len, timeline.processes))
    scale = PLOT / (timeline.seconds + 0.025)
    last = [bar for bar in found if (bar.findtext(f"{SVG}title") or "").startswith(tuple(after))]
    assert len(found) == spans + len(last) and len(last) == 2 * len(timeline.processes)
    for bar, name in zip(last, [*after] * len(timeline.processes), strict=True):
        assert float(bar.attrib["width"]) == pytest.approx(after[name] * scale, abs=1e-3)
    assert float(last[-1].attrib["x"]) + float(last[-1].attrib["width"]) == pytest.approx(LEFT + PLOT, abs=0.01)


def test_a_long_step_is_drawn_with_few_bars_of_the_same_total() -> None:
    timeline = step(micro_batches=512, processes=4)
    _, found = bars(drawn(timeline))
    assert len(found) <= 4 * PLOT
    share = sum(float(bar.attrib["width"]) for bar in found) / (4 * PLOT)
    assert share == pytest.approx(1 - sum(timeline.idle) / 4, abs=0.02)


@pytest.mark.parametrize("svg", [drawn(step()), drawn(step(64)), drawn(step(), {"optimizer": 0.01})])
def test_no_words_lie_over_others_or_leave_the_page(svg: str) -> None:
    page = ElementTree.fromstring(svg)
    lines: dict[float, list[tuple[float, float]]] = {}
    for text in page.iter(f"{SVG}text"):
        start = float(text.attrib["x"])
        lines.setdefault(float(text.attrib["y"]), []).append((start, start + len(text.text or "") * LETTER))
    for places in lines.values():
        places.sort()
        assert all(left[1] <= right[0] + 0.01 for left, right in pairwise(places))
        assert places[0][0] >= 0 and places[-1][1] <= float(page.attrib["width"])
    assert max(lines) < float(page.attrib["height"])
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
    assert "prefers-color-scheme: dark" in svg and page.find(f"{SVG}title") is not None


@pytest.mark.parametrize("width", [40, 80, 120])
def test_terminal_bars_are_as_long_as_their_sizes_and_fit(width: int) -> None:
    lines = memory_text(STAGES, capacity=80 * GIB, width=width).plain.splitlines()
    assert max(map(len, lines)) <= width
    cells = lines[0].index("┃") - lines[0].index("█") + 1  # the capacity is the longest of all
    for line, (weights, activations) in zip(lines, [(20, 30), (18, 15)], strict=False):
        assert line.count("█") == pytest.approx(weights / 80 * cells, abs=1)
        assert line.count("▓") == pytest.approx(activations / 80 * cells, abs=1)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_terminal_steps_fit_and_wait_as_long(width: int) -> None:
    timeline = step(micro_batches=8, processes=4)
    lines = timeline_text(timeline, width=width).plain.splitlines()
    assert max(map(len, lines)) <= width
    cells = width - len("0 ") - len(" 99.9%")
    for line, idle in zip(lines, timeline.idle, strict=False):
        assert line.count("·") / cells == pytest.approx(idle, abs=0.1)
    many = timeline_text(step(micro_batches=64, processes=32), width=width).plain.splitlines()
    assert [int(line.split()[0]) for line in many[:16]][::15] == [1, 32]


def test_what_takes_most_of_a_part() -> None:
    """One process of one stage: forward 1 s and backward 2 s, in three parts and in one."""
    timeline = simulate(order("1f1b", processes=1, micro_batches=1), [StageTime(1, 1, 1)])
    assert most_frequent_action(timeline.processes[0], 3, 3) == ["forward", "backward", "backward"]
    assert most_frequent_action(timeline.processes[0], 3, 1) == ["backward"]
    assert most_frequent_action(timeline.processes[0], 6, 2) == ["backward", None]


@pytest.mark.parametrize("most, step_of", [(0.9, 0.1), (1.0, 0.2), (83.0, 10.0), (141.0, 20.0), (640.0, 100.0)])
def test_ticks_are_round(most: float, step_of: float) -> None:
    assert ticks(most)[1] == pytest.approx(step_of)
    assert most - step_of < ticks(most)[-1] <= most
