"""Draws a plan as SVG: the memory of every pipeline stage, and the timeline of one step.

One file each, without external scripts, fonts or images, in the reader's light or dark colours. Labels use a
monospaced font, so that labels that do not fit can be shortened or omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import floor, log10

from stoker.plan.pipeline.schedule_order import Kind
from stoker.plan.pipeline.timeline import Span, Timeline

LETTER, LINE = 6.7, 16.0  # pixels of a letter's width and a line's height at 11 pixels
LEFT, PLOT, RIGHT = 170.0, 640.0, 150.0  # pixels: labels, bars, numbers
BAR, STEP = 20.0, 28.0  # pixels: height of a bar, from one to the next
COLOURS = (
    "#7fb3e6", "#f2a65a", "#8fc97a", "#e58aa5", "#b79ce0", "#e3c84f", "#6fc7bf", "#c9a27e", "#a8b0ba", "#d9776a",
)  # fmt: skip
KINDS: dict[Kind, tuple[str, str]] = {
    "forward": ("#7fb3e6", "forward"),
    "backward": ("#8fc97a", "backward"),
    "input": ("#6fc7bf", "backward, inputs"),
    "weight": ("#e3c84f", "backward, weights"),
}
AFTER = ("#b79ce0", "#f2a65a", "#e58aa5")  # parts that follow the passes
STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1f2328; }
.page { fill: #ffffff; } .head { font-weight: bold; } .on { fill: #101418; }
.line { stroke: #8c959f; fill: none; } .limit { stroke: #cf222e; stroke-width: 1.5; fill: none; }
.bound { stroke: #57606a; stroke-dasharray: 3 2; fill: none; } .waits { fill: #8c959f; fill-opacity: 0.18; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .on { fill: #101418; } .page { fill: #0d1117; } .line { stroke: #6e7681; }
  .limit { stroke: #ff7b72; } .bound { stroke: #c9d1d9; }
}
"""


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of a device of one pipeline stage.

    Attributes:
        name: of the stage, or process.
        components: bytes of each component, in the order in which they are stacked.
        bound: upper bound in bytes.
    """

    name: str
    components: Mapping[str, float]
    bound: float

    @property
    def total(self) -> float:
        """Bytes of all components."""
        return sum(self.components.values())


def components_of(stages: Sequence[StageMemory]) -> dict[str, int]:
    """Numbers every component that occurs, in order of appearance."""
    names = dict.fromkeys(name for stage in stages for name in stage.components)
    return {name: number for number, name in enumerate(names)}


def plan_svg(
    stages: Sequence[StageMemory],
    timeline: Timeline,
    *,
    capacity: float,
    after: Mapping[str, float],
    title: str,
    step: str = "One step",
) -> str:
    """Draws the memory of the stages above, one step below, each with its heading.

    Memory is a stacked bar of each stage's components, its bound dashed, against the capacity of a device. The step is
    every process' actions over time, by kind; a process' stages after its first are paler.

    Args:
        capacity: bytes of a device.
        after: seconds that follow the passes on all processes, by cause.
        step: heading of the step.
    """
    page = _Page(title)
    page.heading("Memory at its fullest moment")
    _draw_memory(page, stages, capacity)
    page.heading(step)
    _draw_timeline(page, timeline, after)
    return page.done()


def _draw_memory(page: _Page, stages: Sequence[StageMemory], capacity: float) -> None:
    numbers = components_of(stages)
    unit, name = byte_unit(capacity)
    most = max(capacity, *(max(stage.total, stage.bound) for stage in stages)) * 1.02
    top = page.down + LINE
    for row, stage in enumerate(stages):
        y, x = top + row * STEP, LEFT
        page.text(8, y + BAR / 2 + 4, shortened(stage.name, LEFT - 16))
        for component, size in stage.components.items():
            wide = PLOT * size / most
            words = f"{stage.name}, {component}: {size / unit:.2f} {name}"
            page.rect(x, y, wide, BAR, fill=COLOURS[numbers[component] % len(COLOURS)], words=words, label=component)
            x += wide
        page.rect(LEFT, y, PLOT * stage.bound / most, BAR, kind="bound")
        numbers_text = f"{stage.total / unit:.1f} ≤ {stage.bound / unit:.1f} {name}"
        page.text(LEFT + PLOT + 8, y + BAR / 2 + 4, shortened(numbers_text, RIGHT - 8))
    bottom = top + len(stages) * STEP
    limit = LEFT + PLOT * capacity / most
    page.line(limit, top - 6, limit, bottom, kind="limit")
    words = f"capacity {capacity / unit:.1f} {name}"
    page.text(limit - LETTER * len(words), top - 9, words)
    page.axis(bottom, most / unit, name)
    page.legend([(COLOURS[number % len(COLOURS)], component) for component, number in numbers.items()])


def _draw_timeline(page: _Page, timeline: Timeline, after: Mapping[str, float]) -> None:
    seconds = timeline.seconds + sum(after.values())
    unit, name = (1e-3, "ms") if seconds < 1 else (1.0, "s")
    top = page.down
    for row, spans in enumerate(timeline.processes):
        y = top + row * STEP
        page.text(8, y + BAR / 2 + 4, shortened(f"process {row + 1}", LEFT - 16))
        page.rect(LEFT, y, PLOT, BAR, kind="waits")
        first = min(span.stage for span in spans)
        fine = len(spans) <= PLOT / 2
        for span in spans if fine else _merged(spans, seconds, int(PLOT)):
            x, wide = LEFT + PLOT * span.start / seconds, PLOT * (span.end - span.start) / seconds
            colour, called = KINDS[span.kind]
            place = f"stage {span.stage + 1}, micro-batch {span.micro_batch + 1}"
            words = f"{called}, {place}: " if fine else f"mostly {called}: "
            words += f"{span.start / unit:.2f} to {span.end / unit:.2f} {name}"
            label = str(span.micro_batch + 1) if fine else ""
            pale = fine and span.stage != first
            page.rect(x, y, wide, BAR, fill=colour, words=words, label=label, pale=pale)
        _draw_after(page, y, timeline.seconds, after, seconds)
        page.text(LEFT + PLOT + 8, y + BAR / 2 + 4, f"waits {timeline.idle[row]:.1%}")
    page.axis(top + len(timeline.processes) * STEP, seconds / unit, name)
    used = {span.kind for spans in timeline.processes for span in spans}
    entries = [KINDS[kind] for kind in KINDS if kind in used]
    page.legend([*entries, *((AFTER[number % len(AFTER)], name) for number, name in enumerate(after))])


def _draw_after(page: _Page, y: float, start: float, after: Mapping[str, float], seconds: float) -> None:
    unit, unit_name = (1e-3, "ms") if seconds < 1 else (1.0, "s")
    for number, (name, took) in enumerate(after.items()):
        words = f"{name}: {took / unit:.2f} {unit_name}"
        x, wide = LEFT + PLOT * start / seconds, PLOT * took / seconds
        page.rect(x, y, wide, BAR, fill=AFTER[number % len(AFTER)], words=words)
        start += took


def most_frequent_action(spans: Iterable[Span], seconds: float, cells: int) -> list[Kind | None]:
    """Returns the most frequent kind of action in each of ``cells`` equal parts of the step; None for waiting."""
    shares: list[dict[Kind | None, float]] = [{} for _ in range(cells)]
    for span in spans:
        start, end = span.start / seconds * cells, span.end / seconds * cells
        for cell in range(int(start), min(int(end) + 1, cells)):
            share = min(end, cell + 1) - max(start, cell)
            shares[cell][span.kind] = shares[cell].get(span.kind, 0.0) + share
    for share_of in shares:
        share_of[None] = 1 - sum(share_of.values())
    return [max(share_of, key=lambda kind: share_of[kind]) for share_of in shares]


def _merged(spans: Sequence[Span], seconds: float, cells: int) -> list[Span]:
    """Merges spans of one kind, for steps of more actions than can be seen."""
    merged: list[Span] = []
    size = seconds / cells
    for cell, kind in enumerate(most_frequent_action(spans, seconds, cells)):
        if kind is None:
            continue
        if merged and merged[-1].kind == kind and merged[-1].end == cell * size:
            merged[-1] = merged[-1]._replace(end=(cell + 1) * size)
        else:
            merged.append(Span(kind, 0, 0, cell * size, (cell + 1) * size))
    return merged


def byte_unit(size: float) -> tuple[float, str]:
    """(bytes, name) of the unit to write sizes in."""
    return (2.0**30, "GiB") if size >= 2**30 else (2.0**20, "MiB")


def cut(words: str, letters: int) -> str:
    """Returns the words in this number of letters at most, with an ellipsis where they are cut."""
    return words if len(words) <= letters else words[: max(letters - 1, 0)] + "…"


def shortened(words: str, pixels: float) -> str:
    """Returns the part of a label that fits."""
    return cut(words, int(pixels / LETTER))


def ticks(most: float) -> list[float]:
    """Returns round numbers from 0 to at most ``most``, five to ten of them."""
    power = 10.0 ** floor(log10(most))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1.0) if most / (power * part) < 10 or part == 1.0)
    return [step * count for count in range(int(most / step) + 1)]


@dataclass
class _Page:
    """An SVG that grows downwards."""

    title: str
    down: float = 44.0
    parts: list[str] = field(default_factory=list)

    def heading(self, words: str) -> None:
        self.text(8, self.down, words, kind="head")
        self.down += 2 * LINE

    def text(self, x: float, y: float, words: str, *, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:.2f}" y="{y:.2f}"{_class(kind)}>{escape(words)}</text>')

    def rect(
        self, x: float, y: float, wide: float, high: float, *, fill: str = "", kind: str = "", words: str = "",
        label: str = "", pale: bool = False,
    ) -> None:  # fmt: skip
        """Draws a bar with a tooltip, and with a label if it fits."""
        paint = (f' fill="{fill}"' if fill else "") + (' fill-opacity="0.6"' if pale else "")
        hint = f"<title>{escape(words)}</title>" if words else ""
        self.parts.append(
            f'<rect x="{x:.3f}" y="{y:.2f}" width="{wide:.3f}" height="{high:.2f}"{paint}{_class(kind)}>{hint}</rect>'
        )
        if label and len(label) * LETTER + 4 <= wide:
            middle = x + (wide - len(label) * LETTER) / 2
            self.text(middle, y + high / 2 + 4, label, kind="" if pale else "on")

    def line(self, x: float, y: float, to_x: float, to_y: float, *, kind: str = "line") -> None:
        self.parts.append(f'<line x1="{x:.2f}" y1="{y:.2f}" x2="{to_x:.2f}" y2="{to_y:.2f}"{_class(kind)}/>')

    def axis(self, y: float, most: float, unit: str) -> None:
        """Draws an axis from 0 to ``most`` under the bars."""
        self.line(LEFT, y, LEFT + PLOT, y)
        for tick in ticks(most):
            x = LEFT + PLOT * tick / most
            self.line(x, y, x, y + 4)
            words = f"{tick:g}"
            self.text(x - len(words) * LETTER / 2, y + LINE, words)
        self.text(LEFT + PLOT + 8, y + LINE, unit)
        self.down = y + 2 * LINE

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Colours and their meaning, in as many lines as needed."""
        x = LEFT
        for colour, entry in entries:
            words = shortened(entry, PLOT / 2)
            wide = 18 + len(words) * LETTER + 14
            if x + wide > LEFT + PLOT + RIGHT:
                x, self.down = LEFT, self.down + LINE
            self.rect(x, self.down, 12, 12, fill=colour)
            self.text(x + 18, self.down + 10, words)
            x += wide
        self.down += 2 * LINE

    def done(self) -> str:
        wide = LEFT + PLOT + RIGHT
        title = shortened(self.title, wide - 16)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {wide:.0f} {self.down:.0f}" '
            f'width="{wide:.0f}" height="{self.down:.0f}">\n<title>{escape(self.title)}</title>\n'
            f'<style>{STYLE}</style>\n<rect class="page" width="100%" height="100%"/>\n'
            f'<text class="head" x="8" y="20">{escape(title)}</text>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
