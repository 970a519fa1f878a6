"""Sides of benchmarks in processes of their own: what is reported of one that does not end in its time."""

from __future__ import annotations

import sys
from pathlib import Path

import own_process
import pytest

SIDE = """
import sys, time

def hang():
    print("a warning", file=sys.stderr, flush=True)
    time.sleep(60)

hang() if "hangs" in sys.argv else print('RESULT {"rate": 3}')
"""


@pytest.mark.slow
def test_a_side_that_hangs_is_ended_and_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    monkeypatch.setattr(own_process, "LIMIT", 3.0)
    file = tmp_path / "side.py"
    file.write_text(SIDE)
    assert own_process.in_own_process(str(file), "--side", "ends", cpu=True) == {"rate": 3}
    found = own_process.in_own_process(str(file), "--side", "hangs", cpu=False)
    assert isinstance(found, str)
    assert found.startswith("not done in 3 s: a warning")
    assert 'side.py", line 6 in hang' in found
