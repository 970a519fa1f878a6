"""Rollouts on disk: one compressed file per iteration, lossless and without pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stoker.errors import RunFailed
from stoker.files import read_file, replace_file
from stoker.train.rollouts.rollout import Rollout

FORMAT = 1
ROLLOUTS = "rollouts"  # the folder's name in a run
LARGEST = 8 << 30  # bytes of an unpacked iteration; a larger file is rejected


@dataclass(frozen=True)
class Iteration:
    """The rollouts of an iteration.

    Attributes:
        number: counted from 0.
        step: the first optimizer step that trains on them.
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
        """Writes an iteration, replacing an earlier one with its number."""
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
            own=np.concatenate([np.ones(len(r.answer_ids), bool) if r.own is None else r.own for r in rollouts]),
            **arrays,  # type: ignore[arg-type]  # the stub takes them for its own options
        )
        replace_file(self._path(iteration.number), out.getvalue())

    def read(self, number: int) -> Iteration:
        """Reads the rollouts of an iteration.

        Raises:
            RunFailed: the file is missing or damaged.
        """
        path = self._path(number)
        try:
            with BytesIO(read_file(path)) as file, np.load(file, allow_pickle=False) as found:
                if sum(member.file_size for member in found.zip.infolist()) > LARGEST:
                    raise ValueError(f"it unpacks to more than {LARGEST >> 30} GiB")
                arrays: dict[str, np.ndarray] = {name: found[name] for name in found.files}
            return _iteration(_About.model_validate(json.loads(arrays.pop("about").tobytes())), arrays)
        except FileNotFoundError as error:
            raise RunFailed(f"{path} is gone: the answers that this step learns from") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise RunFailed(f"{path} cannot be read ({place}: {first['msg']})") from error
        except Exception as error:  # a damaged archive may raise anything
            raise RunFailed(f"{path} cannot be read ({type(error).__name__}: {error})") from error

    def numbers(self) -> list[int]:
        """Returns the numbers of the iterations on disk, in order."""
        return sorted(int(path.stem) for path in self.folder.glob("*.npz") if path.stem.isdigit())

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.npz"


class _AboutRollout(BaseModel):
    """Fields of a rollout beside its arrays."""

    model_config = ConfigDict(strict=True)

    prompt: int
    sample: int
    source: str
    row: int
    ended: Literal["stop", "length", "cancelled", "failed"]
    rewards: dict[str, float]
    score: float


class _About(BaseModel):
    """Fields of an iteration beside its arrays."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    number: int
    step: int
    next_prompt: int
    figures: dict[str, float]
    rollouts: list[_AboutRollout] = Field(min_length=1)


def _iteration(about: _About, arrays: dict[str, np.ndarray]) -> Iteration:
    """Rebuilds an iteration from a file's content.

    Raises:
        ValueError, KeyError: an array is missing, or its type or length does not match the others.
    """
    prompts = _split(arrays.pop("prompts"), lengths := arrays.pop("prompt_lengths"), np.unsignedinteger)
    ends = arrays.pop("answer_lengths")
    answers = _split(arrays.pop("answers"), ends, np.unsignedinteger)
    if not len(about.rollouts) == len(lengths) == len(ends):
        raise ValueError(f"{len(about.rollouts)} answers have {len(lengths)} prompts and {len(ends)} lengths")
    own = _split(arrays.pop("own"), ends, np.bool_) if "own" in arrays else [np.ones(n, bool) for n in ends]
    ends = np.array([each.sum() for each in own])
    tokens = {name.removeprefix("tokens/"): _split(values, ends, np.floating) for name, values in arrays.items()}
    rollouts = tuple(
        Rollout(
            prompt=each.prompt,
            sample=each.sample,
            source=each.source,
            row=each.row,
            prompt_ids=prompts[i],
            answer_ids=answers[i],
            ended=each.ended,
            rewards=each.rewards,
            score=each.score,
            tokens={name: values[i] for name, values in tokens.items()},
            own=None if own[i].all() else own[i],
        )
        for i, each in enumerate(about.rollouts)
    )
    return Iteration(about.number, about.step, about.next_prompt, rollouts, about.figures)


def _split(values: np.ndarray, lengths: np.ndarray, kind: type[np.generic]) -> list[np.ndarray]:
    whole = lengths.ndim == 1 and np.issubdtype(lengths.dtype, np.integer) and (lengths >= 0).all()
    if not whole or values.shape != (int(lengths.sum()),) or not np.issubdtype(values.dtype, kind):
        raise ValueError(f"an array of {values.dtype} {values.shape} does not fit the lengths of the answers")
    return np.split(values, lengths.cumsum()[:-1])
