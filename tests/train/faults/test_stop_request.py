"""A signal that comes while the progress is printed."""

from __future__ import annotations

import io
import os
import signal
import threading
import time

import pytest
from rich.console import Console

from stoker.job.blocks.faults_block import FaultsBlock
from stoker.resilience.heartbeat import Heart
from stoker.resilience.stop_signals import STOPPING, handled_by
from stoker.train.display import Display
from stoker.train.faults.stop_request import StopRequest


def test_a_signal_within_a_print_stops_the_run_with_its_step() -> None:
    """The pipe is full until the reader continues, so the signal interrupts the write."""
    reads, writes = os.pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(writes, "w"), 64), write_through=True)
    display = Display("token", console=Console(file=stream, width=200, highlight=False))
    stop = StopRequest(faults=FaultsBlock(), heart=Heart(), display=display)
    main, found = threading.get_ident(), list[bytes]()

    def interrupt() -> None:
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        while part := os.read(reads, 1 << 16):
            found.append(part)

    thread = threading.Thread(target=interrupt)
    with stop.heard():
        thread.start()
        display.note("x" * (1 << 17))  # more than a pipe holds
        assert stop.signal == signal.SIGINT
    stream.close()
    thread.join()
    os.close(reads)
    text = b"".join(found).decode()
    assert text.count("x") == 1 << 17 and STOPPING in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_with_its_step_where_no_thread_can_be_started(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stop = StopRequest(faults=FaultsBlock(), heart=Heart(), display=Display("token"))
    with stop.heard():
        monkeypatch.setattr(threading.Thread, "start", refuses)
        signal.raise_signal(number)
        monkeypatch.undo()
    assert stop.signal == number


def test_a_closed_terminal_asks_once_and_nohup_never() -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        with handled_by(lambda number, _: asked.append(number)):
            signal.raise_signal(signal.SIGHUP)  # by the terminal, and by its shell
            signal.raise_signal(signal.SIGHUP)
        assert asked == [signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with handled_by(lambda number, _: asked.append(number)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == [signal.SIGHUP]
