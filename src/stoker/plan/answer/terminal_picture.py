"""Draws a plan in a terminal: the pictures of `stoker.plan.answer.picture` in block characters, of limited width.

Parts are distinguished by colours where the terminal has them, else by the blocks' patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from stoker.plan.answer.picture import StageMemory, byte_unit, components_of, cut, most_frequent_action
from stoker.plan.pipeline.schedule_order import Kind
from stoker.plan.pipeline.timeline import Timeline

PATTERNS = "█▓▒░▚▞▤▥▦▧"
COLOURS = ("blue", "yellow", "green", "red", "magenta", "cyan", "bright_blue", "bright_yellow", "bright_green", "white")
KINDS: dict[Kind | None, tuple[str, str, str]] = {
    "forward": ("█", "blue", "forward"),
    "backward": ("▓", "green", "backward"),
    "input": ("▓", "cyan", "backward, inputs"),
    "weight": ("▒", "yellow", "backward, weights"),
    None: ("·", "dim", "waits"),
}
ROWS = 16  # processes that are shown; of more, as many at equal distances


def memory_text(stages: Sequence[StageMemory], *, capacity: float, width: int = 80) -> Text:
    """Returns a bar for each stage, the bound's end as ``╎`` and the device's capacity in bytes as ``┃``."""
    numbers, (unit, name) = components_of(stages), byte_unit(capacity)
    labels = [f"{stage.total / unit:.1f} ≤ {stage.bound / unit:.1f}" for stage in stages]
    left = min(max(len(stage.name) for stage in stages), width // 4)
    cells = max(width - left - max(map(len, labels)) - 2, 8)
    most = max(capacity, *(max(stage.total, stage.bound) for stage in stages))
    out = Text()
    for stage, label in zip(stages, labels, strict=True):
        row = [(" ", "")] * cells
        done = 0.0
        for component, size in stage.components.items():
            start, done = done, done + size
            style = (_of(PATTERNS, numbers[component]), _of(COLOURS, numbers[component]))
            for cell in range(round(start / most * cells), round(done / most * cells)):
                row[cell] = style
        row[_mark(stage.bound, most, cells)] = ("╎", "bold")
        row[_mark(capacity, most, cells)] = ("┃", "bold red")
        out.append(f"{cut(stage.name, left):<{left}} ")
        _append(out, row)
        out.append(f" {label}\n")
    entries = [(_of(PATTERNS, number), _of(COLOURS, number), component) for component, number in numbers.items()]
    entries += [("╎", "bold", "bound"), ("┃", "bold red", f"capacity {capacity / unit:.1f} {name}")]
    return _legend(out, entries, width)


def timeline_text(timeline: Timeline, *, width: int = 80) -> Text:
    """Draws a row for each process; each character shows the action that takes most of its part of the step."""
    count, seconds = len(timeline.processes), timeline.seconds
    shown = sorted({round(row * (count - 1) / max(1, min(ROWS, count) - 1)) for row in range(min(ROWS, count))})
    left = len(str(count))
    cells = max(width - left - len(" 99.9%") - 1, 8)
    out, used = Text(), set()
    for at in shown:
        kinds = most_frequent_action(timeline.processes[at], seconds, cells)
        used |= set(kinds)
        out.append(f"{at + 1:>{left}} ")
        _append(out, [KINDS[kind][:2] for kind in kinds])
        out.append(f" {timeline.idle[at]:>5.1%}\n")
    end = f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
    out.append(f"{'':>{left}} 0{end:>{cells - 1}} waits\n", style="dim")
    return _legend(out, [entry for kind, entry in KINDS.items() if kind in used], width)


def _append(out: Text, row: Sequence[tuple[str, str]]) -> None:
    """Cells of (letter, style), those that look alike together."""
    for (letter, style), alike in groupby(row):
        out.append(letter * len(list(alike)), style=style)


def _legend(out: Text, entries: Sequence[tuple[str, str, str]], width: int) -> Text:
    """Letters and their meaning, in as many lines as needed."""
    used = 0
    for letter, style, entry in entries:
        words = cut(entry, width - 4)
        if used and used + len(words) + 4 > width:
            out.append("\n")
            used = 0
        out.append(letter, style=style)
        out.append(f" {words}  ")
        used += len(words) + 4
    return out


def _mark(size: float, most: float, cells: int) -> int:
    return min(round(size / most * cells), cells - 1)


def _of(letters: Sequence[str], number: int) -> str:
    return letters[number % len(letters)]
