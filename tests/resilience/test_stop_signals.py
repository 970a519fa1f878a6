"""One request to stop, however often a scheduler and a supervisor send it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stoker.cli.commands import serve, ui
from stoker.cli.main import main
from stoker.resilience import stop_signals
from stoker.resilience.stop_signals import handled_by


def test_a_repeated_sigterm_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now)
    came: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with handled_by(lambda number, _: came.append(number)):
        signal.raise_signal(signal.SIGTERM)
        now = 104.0
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
        now = 106.0
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_interrupt_from_the_keyboard_counts_at_once() -> None:
    came: list[int] = []
    with handled_by(lambda number, _: came.append(number)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert came == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGHUP, 129)])
def test_a_server_that_still_loads_ends_as_one_that_serves(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    number: int,
    code: int,
) -> None:
    def load(*_: object) -> None:
        signal.raise_signal(number)

    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # in the background it may be ignored
    request.addfinalizer(lambda: signal.signal(number, before))
    monkeypatch.setattr(serve, "require_hub_model", load)
    monkeypatch.setattr(ui, "_check", load)
    for words in (["serve", "one"], ["ui"]):
        if code:
            with pytest.raises(SystemExit) as end:
                main(words)
            assert end.value.code == code
        else:
            assert main(words) == 0
            assert capsys.readouterr().err == "ended\n"


def test_a_stop_beside_a_thread_that_loads_ends_the_process_at_once() -> None:
    code = """
import signal
from stoker.hardware.process.daemon_thread import in_daemon_thread
from stoker.resilience.stop_signals import exit_at_signals, stop_is_success
with exit_at_signals(), stop_is_success(at_once=True):
    in_daemon_thread(signal.pause, "loading")
    signal.raise_signal(signal.SIGTERM)
print("an orderly exit")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "ended\n")
