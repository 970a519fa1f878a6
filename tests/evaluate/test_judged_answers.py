"""Judges of ``stoker eval --answers``: asked several at once while answers are generated, in the order of the rows."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation_rows import QUESTIONS, write_lines

from stoker.cli.main import main
from stoker.errors import RunFailed
from stoker.generate.generation_engine import GenerationEngine
from stoker.scoring.concurrent_calls import AT_ONCE
from stoker.scoring.judge import Judge

NAME = "judge:http://127.0.0.1:1/v1,mine"
WORDS = ["--answers", "asked.jsonl", "--score", NAME, "--max-tokens", "20", "--json"]
VERDICTS = dict(zip((question for question, _ in QUESTIONS), ["A", "B", "TIE"], strict=True))


def verdict_on(question: str, a: str) -> str:
    """Verdict on the expected answer in either place: by the question it wins, loses or ties."""
    said = VERDICTS[question.removeprefix("user: ")]
    expected = dict(QUESTIONS)[question.removeprefix("user: ")]
    return said if a == expected or said == "TIE" else "B" if said == "A" else "A"


def as_judge(monkeypatch: pytest.MonkeyPatch, ask: Callable[[str, str], str]) -> None:
    monkeypatch.setattr(Judge, "_ask", lambda _, question, a, b: ask(question, a))


@pytest.mark.parametrize("against", [[], ["--against", "good"]])
def test_judges_are_asked_several_at_once_and_their_scores_are_in_the_order_of_rows(
    against: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, all_busy, running, most = threading.Lock(), threading.Event(), 0, 0

    def ask(question: str, a: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if running == AT_ONCE:
            all_busy.set()
        assert all_busy.wait(10), "fewer are asked at once"
        time.sleep(0.02 if "blue" in question else 0)  # the verdicts come in another order than the rows
        with lock:
            running -= 1
        return verdict_on(question, a)

    as_judge(monkeypatch, ask)
    assert main(["eval", "bad", *against, *WORDS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert most == AT_ONCE
    rows = [json.loads(line) for line in Path(found["kept"]).with_suffix(".jsonl").read_text().splitlines()]
    assert [row["why"][NAME] for row in rows] == ["loss", "win", "tie"] * 4
    assert [row["scores"][NAME] for row in rows] == [0, 1, 0.5] * 4
    if against:
        assert [row["against"]["scores"][NAME] for row in rows] == [1, 0, 0.5] * 4


def test_a_judge_is_asked_while_other_answers_are_generated(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run = threading.Event(), GenerationEngine.run

    def ask(question: str, a: str) -> str:
        asked.set()
        return verdict_on(question, a)

    def waits_for_the_judge(*given: Any) -> Any:
        found = run(*given)
        assert asked.wait(10), "no judge was asked before the last answer"
        return found

    as_judge(monkeypatch, ask)
    monkeypatch.setattr(GenerationEngine, "run", waits_for_the_judge)
    assert main(["eval", "good", *WORDS]) == 0


def test_a_failing_judge_ends_the_generation(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, steps, step = threading.Event(), [], GenerationEngine.step

    def ask(question: str, a: str) -> str:
        failed.set()
        raise RunFailed("the judge answered 401 Unauthorized")

    def counted(engine: GenerationEngine) -> None:
        step(engine)
        steps.append(engine.running)
        if engine.running == 8:  # the answers to one of the three questions have ended
            assert failed.wait(10)
            time.sleep(0.1)

    as_judge(monkeypatch, ask)
    monkeypatch.setattr(GenerationEngine, "step", counted)
    assert main(["eval", "good", *WORDS]) == 1
    assert "asked.jsonl:" in (said := capsys.readouterr().err) and said.count("401 Unauthorized") == 1
    assert steps[-1] > 0  # others had not ended


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_wait_for_a_judge(number: int, here: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the requests, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        rows = write_lines(tmp_path / "asked.jsonl", [{"prompt": q, "expected": a} for q, a in QUESTIONS])
        command = ["eval", "good", "--answers", str(rows), "--score", f"judge:{url},mine", "--max-tokens", "20"]
        process = subprocess.Popen([sys.executable, "-m", "stoker", *command], stderr=subprocess.PIPE, text=True)
        silent.settimeout(60)
        silent.accept()
        begin = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "Traceback" not in said
    assert time.monotonic() - begin < 5
