"""Jobs run in this process as ``stoker train`` runs them, and what is asked of their results."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.dcp_store import State, Store
from stoker.job.document.job_to_yaml import scalar
from stoker.job.load_job import LoadedJob, load_job
from stoker.runs.run_folder import RunFolder
from stoker.train.engine import Counts
from stoker.train.loop import Loop
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.run import train_run
from stoker.train.run_result import RunResult
from stoker.train.task import Part

WORDS = "the sea is blue and cold today how are you please write a poem about wind".split()  # noqa: SIM905


def write_rows(path: Path, rows: int, *, salt: int = 0) -> Path:
    """Instruction rows of uneven length, all different."""
    with path.open("w") as file:
        for i in range(rows):
            words = [WORDS[(i * 7 + j * (3 + salt)) % len(WORDS)] for j in range(2 + i % 5)]
            answer = " ".join([*reversed(words), str(i + salt)])
            file.write(json.dumps({"prompt": " ".join(words) + "?", "completion": answer}) + "\n")
    return path


@dataclass(frozen=True)
class Ran:
    """A job that has been run."""

    loaded: LoadedJob
    prepared: Prepared
    outcome: RunResult
    loop: Loop
    folder: RunFolder

    @property
    def store(self) -> Store:
        return self.loop.store

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.folder.read_metrics()]

    def last_state(self) -> State:
        """The newest checkpoint."""
        return self.store.load(self.store.steps()[-1])


def write_job(base: Path, job: dict[str, Any]) -> Path:
    """A job as a YAML file."""
    path = base / "job.yaml"
    path.write_text("".join(f"{key}: {scalar(value)}\n" for key, value in job.items()))
    return path


def run(base: Path, job: dict[str, Any], *overrides: str, before: Callable[[Prepared], None] = lambda _: None) -> Ran:
    """Runs a job; ``before`` is called with it when all is prepared."""
    loaded = load_job(write_job(base, job), overrides)
    prepared = prepare(loaded, base)
    before(prepared)
    folder = RunFolder(base / loaded.job.output)
    with folder.take():
        outcome, loop = train_run(prepared, folder, base, quiet=True)
    return Ran(loaded, prepared, outcome, loop, folder)


@dataclass(frozen=True)
class Marked(Part):
    """A part that knows the samples of its micro-batch."""

    samples: tuple[int, int] = (0, 0)


def watching(see: Callable[[int, int, list[Part]], None]) -> Callable[[Prepared], None]:
    """Called when the passes of a micro-batch begin, with its samples: the first, and the one after the last."""

    def before(prepared: Prepared) -> None:
        parts, train = prepared.task.parts, prepared.engine.train

        def marked(first: int, last: int) -> list[Part]:
            return [Marked(**{**vars(part), "samples": (first, last)}) for part in parts(first, last)]

        def watched(parts: Sequence[Marked], counts: Counts, scaler: torch.amp.GradScaler) -> Tensor:
            for samples, group in groupby(parts, key=lambda part: part.samples):
                see(*samples, list(group))
            return train(parts, counts, scaler)

        prepared.task.parts, prepared.engine.train = marked, watched  # type: ignore[method-assign, assignment]

    return before


def at_sample(sample: int, act: Callable[[], None]) -> Callable[[Prepared], None]:
    """Acts when the passes of a step with a sample begin."""

    def see(first: int, last: int, _: list[Part]) -> None:
        if first <= sample < last:
            act()

    return watching(see)


def stop_at(sample: int) -> Callable[[Prepared], None]:
    """A signal comes in the middle of the step that takes a sample."""
    return at_sample(sample, lambda: signal.raise_signal(signal.SIGTERM))


class Crash(Exception):
    """What no part of a run expects."""


def crash_at(sample: int) -> Callable[[Prepared], None]:
    """The run dies in the middle of the step that takes a sample, without reporting why."""

    def crash() -> None:
        raise Crash

    return at_sample(sample, crash)


def assert_same_state(a: State, b: State) -> None:
    """Two checkpoints are equal to the bit: weights, optimizer, numbers."""
    assert a.step == b.step and a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name
