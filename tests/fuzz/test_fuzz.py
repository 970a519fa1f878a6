"""A share of what `make fuzz` runs: no spoilt job, data file or model ends in a traceback or does not end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_spoilt_input_is_refused_in_words(tmp_path: Path) -> None:
    sizes = ("--jobs", "24", "--data", "8", "--models", "3", "--workers", "1")
    words = [sys.executable, str(Path(__file__).parent), "--seed", "1", *sizes]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    lines = [line.partition(":")[0] for line in ended.stdout.splitlines()]
    assert lines == ["jobs", "data", "models"]
