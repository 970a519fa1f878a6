"""OpenMP reads how its threads wait when torch is loaded, so what trains on answers of its own says it before."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

SAYS = """
import os, sys
from stoker.cli.train.openmp_threads import patient_threads
patient_threads()
print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
"""


def said() -> list[str]:
    return subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True).stdout.split()


def test_threads_sleep_where_other_work_has_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(psutil.cpu_count() or 1)]
    try:
        assert said() == ["PASSIVE", "False"]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_what_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert said() == ["ACTIVE", "False"]
