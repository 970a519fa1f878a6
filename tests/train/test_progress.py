"""What a run shows: a live line on a terminal, few plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios

import pytest
from rich.console import Console

from stoker.runs.step_metrics import StepMetrics
from stoker.train.display import Display, KeptConsole
from stoker.train.evaluate import Evaluation


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step, 2.5, 1.25, 1e-3, 640, 320, 1234.5, 0.5, 2.0)


def shown(steps: int, *, terminal: bool = False, quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200, highlight=False)
    with Display("token", console=console, quiet=quiet) as display:
        display.steps = steps
        for step in range(1, steps + 1):
            display.step(metrics(step))
        display.evaluated(steps, Evaluation(1.5, 0.25, 100))
        display.note("a [bracketed] note")
    return file.getvalue()


def test_a_pipe_gets_plain_lines_and_not_too_many() -> None:
    lines = shown(1000).splitlines()
    assert 90 <= len(lines) <= 110 and "\x1b" not in "".join(lines)
    assert lines[0].startswith("step 1/1000  loss 2.5000  grad 1.25  lr 1.00e-03  1,234 tokens/s  0.50 GiB")
    assert any(line.startswith("step 1000/1000") and line.endswith("left 0:00") for line in lines)
    assert "held out at step 1000: loss 1.5000  token accuracy 25.0%" in lines
    assert lines[-1] == "a [bracketed] note"


def test_a_terminal_gets_a_live_line() -> None:
    text = shown(3, terminal=True)
    assert "\x1b" in text and "3/3" in text and "1,234 tokens/s" in text


def test_quiet_is_quiet() -> None:
    assert shown(10, quiet=True) == ""


@pytest.mark.parametrize(("left", "words"), [(1, "left 0:02"), (45, "left 1:30"), (1800, "left 1:00:00")])
def test_the_time_that_is_left(left: int, words: str) -> None:
    file = io.StringIO()
    display = Display("token", console=Console(file=file, width=200))
    display.steps = left + 1
    display.step(metrics(1))
    assert words in file.getvalue()


def test_a_kept_terminal_is_measured_itself_and_a_kept_pipe_gets_plain_lines() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 133, 0, 0))
    console = KeptConsole(theirs)
    assert console.is_terminal and console.size == (133, 24)
    with Display("token", console=console) as display:
        display.steps = 2
        display.step(metrics(2))
        said = b""
        while b"2/2" not in said:
            said += os.read(ours, 65536)
    reader, writer = os.pipe()
    with Display("token", console=KeptConsole(writer)) as display:
        display.steps = 2
        display.step(metrics(2))
        assert os.read(reader, 65536).startswith(b"step 2/2  loss 2.5000")
