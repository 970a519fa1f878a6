"""The rollouts of a run on disk: one compressed file an iteration, exact, and no pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import RunFailed
from stoker.files import replace_file
from stoker.train.rollouts.rollout import Rollout

FORMAT = 1


@dataclass(frozen=True)
class Iteration:
    """The rollouts of an iteration.

    Attributes:
        number: counted from 0.
        step: the first optimizer step that learns from them.
        next_prompt: number of the first prompt of the next iteration.
        figures: means over the rollouts, by name.
    """

    number: int
    step: int
    next_prompt: int
    rollouts: tuple[Rollout, ...]
    figures: dict[str, float]


@dataclass(frozen=True)
class RolloutFiles:
    """The folder ``rollouts`` of a run."""

    folder: Path

    def write(self, iteration: Iteration) -> None:
        """Writes an iteration, in the place of an earlier one of its number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rollouts = iteration.rollouts
        names = sorted({name for rollout in rollouts for name in rollout.tokens})
        arrays = {f"tokens/{name}": np.concatenate([rollout.tokens[name] for rollout in rollouts]) for name in names}
        about = {
            "format": FORMAT,
            "number": iteration.number,
            "step": iteration.step,
            "next_prompt": iteration.next_prompt,
            "figures": iteration.figures,
            "rollouts": [
                {
                    "prompt": r.prompt,
                    "sample": r.sample,
                    "source": r.source,
                    "row": r.row,
                    "ended": r.ended,
                    "rewards": r.rewards,
                    "score": r.score,
                }
                for r in rollouts
            ],
        }
        out = BytesIO()
        np.savez_compressed(
            out,
            about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            prompts=np.concatenate([r.prompt_ids for r in rollouts]).astype(np.uint32),
            prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts]),
            answers=np.concatenate([r.answer_ids for r in rollouts]).astype(np.uint32),
            answer_lengths=np.array([len(r.answer_ids) for r in rollouts]),
            **arrays,  # type: ignore[arg-type]  # the stub takes them for its own options
        )
        replace_file(self._path(iteration.number), out.getvalue())

    def read(self, number: int) -> Iteration:
        """The rollouts of an iteration, as they were written.

        Raises:
            RunFailed: there are none, or the file is damaged.
        """
        path = self._path(number)
        try:
            with np.load(path, allow_pickle=False) as found:
                arrays: dict[str, np.ndarray] = {name: found[name] for name in found.files}
            about: dict[str, Any] = json.loads(arrays.pop("about").tobytes())
        except FileNotFoundError as error:
            raise RunFailed(f"{path} is gone: the answers that this step learns from") from error
        except Exception as error:  # a damaged archive raises of every kind
            raise RunFailed(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        prompts = np.split(arrays.pop("prompts"), arrays.pop("prompt_lengths").cumsum()[:-1])
        ends = arrays.pop("answer_lengths").cumsum()[:-1]
        answers = np.split(arrays.pop("answers"), ends)
        tokens = {name.removeprefix("tokens/"): np.split(values, ends) for name, values in arrays.items()}
        rollouts = [
            Rollout(
                each["prompt"],
                each["sample"],
                each["source"],
                each["row"],
                prompts[i],
                answers[i],
                each["ended"],
                each["rewards"],
                each["score"],
                {name: values[i] for name, values in tokens.items()},
            )
            for i, each in enumerate(about["rollouts"])
        ]
        return Iteration(about["number"], about["step"], about["next_prompt"], tuple(rollouts), about["figures"])

    def numbers(self) -> list[int]:
        """The iterations that are there, in order."""
        return sorted(int(path.stem) for path in self.folder.glob("*.npz") if path.stem.isdigit())

    def at_step(self, step: int) -> Iteration | None:
        """The rollouts that a step learnt from; None where there are none that early."""
        return self._newest(self.numbers(), step)

    def _newest(self, numbers: Sequence[int], step: int) -> Iteration | None:
        low, high = 0, len(numbers)
        while low < high:  # iterations begin at ever later steps
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.read(numbers[middle]).step <= step else (low, middle)
        return self.read(numbers[low - 1]) if low else None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.npz"
