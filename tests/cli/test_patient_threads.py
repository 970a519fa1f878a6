"""OpenMP reads how its threads wait when torch is loaded, so the verbs that generate have to say it before."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = """
import os, sys
import stoker.cli.report as report
say = report.patient_threads
def patient_threads():
    say()
    print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
    sys.exit(0)
report.patient_threads = patient_threads
from stoker.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["chat", "none"], ["eval", "none"], ["serve", "none"]], ids=lambda words: words[0])
def test_threads_are_told_to_sleep_before_torch_is_loaded(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    said = subprocess.run([sys.executable, "-c", SAYS, *words], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["PASSIVE", "False"]
