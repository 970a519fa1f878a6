"""How many modules of Stoker run until the first optimizer step of a job, and which of them are on the call stack then.

    python benchmarks/reading_path.py JOB.yaml [key=value ...]

It trains one step of a job in this process, with AdamW, into a folder that is removed.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import stoker
from stoker.cli.main import main

ROOT = f"{Path(stoker.__file__).parent}/"
FUNCTION = 1  # a code flag (CO_OPTIMIZED): bodies of modules and classes do not have it


class Reached(BaseException):
    """The first step."""


def entered(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Modules in which a function was called, and those on the stack at the step, each in order."""
    seen: dict[str, None] = {}
    stack: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and frame.f_code.co_flags & FUNCTION:
            seen.setdefault(file.removeprefix(ROOT))

    def step(*_: Any, **__: Any) -> None:
        sys.setprofile(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if (file := frame.f_code.co_filename).startswith(ROOT):
                stack.insert(0, file.removeprefix(ROOT))
            frame = frame.f_back
        raise Reached

    torch.optim.AdamW.step = step  # type: ignore[method-assign, assignment]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        main(["train", *arguments])
    except Reached:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(seen), list(dict.fromkeys(stack))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        modules, stack = entered([*sys.argv[1:], "faults.restarts=0", f"output={folder}/run"])
    print(f"{len(modules)} modules entered:", Counter(module.partition("/")[0] for module in modules))
    print(f"{len(stack)} on the stack:", *stack)
