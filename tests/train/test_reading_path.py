"""The reading path of `docs/architecture.md` is there, short, and in the order of the calls."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from running import write_job
from test_module import JOB

from stoker.cli.main import main

ROOT = Path(__file__).parents[2]
MOST = 30
PATH = re.findall(r"^\| (\d+) \| `([\w/]+\.py)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
FILES = [file for _, file in PATH]


def test_it_is_short_and_names_files_that_exist() -> None:
    assert 20 < len(PATH) <= MOST and [int(number) for number, _ in PATH] == list(range(1, len(PATH) + 1))
    assert len(set(FILES)) == len(FILES)
    assert [file for file in FILES if not (ROOT / "src" / "stoker" / file).is_file()] == []


def test_the_call_stack_of_the_step_lies_on_it_in_order(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, stack = f"{ROOT / 'src' / 'stoker'}/", []
    step = torch.optim.AdamW.step

    def noting(self: torch.optim.AdamW, *arguments: Any, **options: Any) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and stack[:1] != ["cli/main.py"]:
            if (file := frame.f_code.co_filename).startswith(source):
                stack.insert(0, file.removeprefix(source))
            frame = frame.f_back
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    monkeypatch.chdir(base)
    write_job(base, {**JOB, "epochs": None, "steps": 1, "faults": {"restarts": 0}})
    assert main(["train", "job.yaml"]) == 0
    assert "done: run" in capsys.readouterr().out
    places = [FILES.index(file) for file in dict.fromkeys(stack)]
    assert places == sorted(places) and FILES[places[0]] == "cli/main.py" and FILES[places[-1]] == FILES[-1]
