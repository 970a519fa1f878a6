"""Loads a run's model with the weights of one of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from stoker.checkpoint.dcp_store import Store, place_of
from stoker.checkpoint.run_weights import AVERAGE, restore_weights, with_averaged_weights, with_synchronised_weights
from stoker.checkpoint.state import DamagedError, Places, State
from stoker.errors import Problem, RunFailed, UserError
from stoker.hardware.process_device import Device
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import SHARED_CRITIC, task_of
from stoker.job.trust import code_problems
from stoker.models.build_model import build_model
from stoker.models.critic import remove_critic
from stoker.models.text import TextSide, open_text_side
from stoker.models.tuning.adapters import keep_originals
from stoker.models.tuning.quantise import device_for
from stoker.parallel.float64_mode import arithmetic_of
from stoker.runs.find_run import find_run
from stoker.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRIES = 5  # checkpoints that a training run may delete while they are read


@dataclass(frozen=True)
class TunedRun:
    """A trained language model.

    Attributes:
        folder: folder of the run.
        step: step of the checkpoint.
        model: the model with its adapters, in evaluation mode.
        text: tokenizer, codec and sequence length.
        base: the folder that the job's relative paths refer to.
        averaged: whether the weights are averages over the steps.
    """

    folder: RunFolder
    loaded: LoadedJob
    step: int
    model: nn.Module
    text: TextSide
    device: Device
    base: Path = Path()
    averaged: bool = False

    @property
    def job(self) -> ResolvedJob:
        return self.loaded.job

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self.text.tokenizer


def checkpoint_step(folder: RunFolder, job: ResolvedJob, at: str, base: Path) -> tuple[Store, int]:
    """Returns the store and step of a checkpoint: ``last``, ``best``, or a step; ``average`` uses the last one.

    Raises:
        UserError: the run has no such checkpoint.
    """
    store = Store(place_of(job.checkpoint.to, folder, base))
    steps = store.steps()
    if not steps:
        raise UserError(f"{folder.path} has no checkpoint yet")
    if at in ("last", AVERAGE):
        return store, steps[-1]
    if at == "best":
        best = store.numbers(steps[-1])["progress"]["best_step"]
        if best not in steps:
            raise UserError(f"{folder.path} has no best checkpoint: nothing was held out, or checkpoint.best is false")
        return store, best
    step = next((step for step in steps if str(step) == at.lstrip("0")), None)
    if step is None:
        raise UserError(
            f"{folder.path} has no checkpoint {at!r}: write last, best, average, or one of {', '.join(map(str, steps))}"
        )
    return store, step


def state_at(folder: RunFolder, job: ResolvedJob, at: str, base: Path, elsewhere: Places = lambda _saved: {}) -> State:
    """Reads a whole checkpoint; see `checkpoint_step`. With ``average`` its weights are the averages.

    Between two synchronisations of islands (`parallel.sync`) the weights are those of the last one. If the run trains
    and deletes the checkpoint meanwhile, the one that `at` names then is read.

    Args:
        elsewhere: destinations of tensors that are not part of the result.

    Raises:
        UserError: the run has no such checkpoint, or kept no averages.
        RunFailed: the checkpoint is damaged, or the run deletes its checkpoints before they are read.
    """
    for _ in range(TRIES):
        store, step = checkpoint_step(folder, job, at, base)
        try:
            state = store.load(step, elsewhere)
        except DamagedError:
            if step in store.steps():
                raise
        else:
            return with_averaged_weights(state) if at == AVERAGE else with_synchronised_weights(state)
    hint = "stop it with `stoker stop`, or write a larger checkpoint.keep in its job"
    raise RunFailed(Problem(f"{folder.path} trains and deletes its checkpoints before they are read", hint))


def job_of_run(path: str, base: Path, trusted: Sequence[str] = ()) -> tuple[RunFolder, LoadedJob]:
    """Returns the folder and the job of a language model's run.

    Raises:
        UserError: there is no such run, it has no language model, or it needs code that the user does not trust.
    """
    folder = find_run(path, base)
    loaded = load_job(folder.job, trusted)
    job = loaded.job
    if job.model is None and task_of(job).ranks:
        hint = "measure it with `stoker eval RUN`, or export it with `stoker export RUN --format ranking --to DIR`"
        raise UserError(Problem(f"{folder.path} is a run of task {job.task}, without a language model", hint))
    if job.model is None:
        raise UserError(
            f"{folder.path} trained a module of your own: load its weights in Python, from {folder.checkpoints}"
        )
    if problems := code_problems(loaded):
        raise UserError(*problems)
    return folder, loaded


def open_run(path: str, base: Path, *, at: str = "last", trusted: Sequence[str] = ()) -> TunedRun:
    """Loads a run's model with the weights of a checkpoint.

    Args:
        trusted: keys of the run that may run code and that the user trusts, as ``key=value``.

    Raises:
        UserError: see `job_of_run`; or the run has no such checkpoint.
    """
    folder, loaded = job_of_run(path, base, trusted)
    job = loaded.job
    assert job.model is not None
    state = state_at(folder, job, at, base)
    # A model trained in mixed precision is also used in it.
    device = device_for(job)
    text = open_text_side(loaded, base)
    with arithmetic_of(device):
        model = build_model(job, base, device, stop_id=text.tokenizer.eos_token_id)
    keep_originals(model)
    restore_weights(model, state)
    if task_of(job).model.critic(job) == SHARED_CRITIC:
        remove_critic(model)
    return TunedRun(
        folder=folder,
        loaded=loaded,
        step=state.step,
        model=model.eval(),
        text=text,
        device=device,
        base=base,
        averaged=at == AVERAGE,
    )
