"""Loss of each trained token of data under a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from stoker.checkpoint.load_run import TunedRun
from stoker.data.sequences import Document
from stoker.data.token_cache import Row
from stoker.errors import Problem, UserError
from stoker.grouping import grouped
from stoker.job.resolved import ResolvedJob
from stoker.models.attention.collate import Inputs
from stoker.models.head import Head, LogitsHead
from stoker.models.language_model import lay_out_for
from stoker.models.objective import next_token
from stoker.models.tuning.adapters import unwrap
from stoker.parallel.float64_mode import arithmetic_of
from stoker.runs.run_folder import RunFolder
from stoker.train.language.language_task import EVALUATION_TOKENS, LanguageTask
from stoker.train.language.measured_task import measured_training, objective_of
from stoker.train.single_process import SingleProcess


def check_token_losses(job: ResolvedJob, folder: RunFolder) -> None:
    """Rejects a run whose loss is not a mean over tokens; its model need not be open.

    Raises:
        UserError: the run's task has such a loss.
    """
    if measured_training(job).target != "token" or objective_of(job) is not next_token:
        message = f"the loss of {folder.path} (task {job.task}) is not one of single tokens"
        raise UserError(Problem(message, "measure a run of pretrain or sft"))


@contextmanager
def measuring(tuned: TunedRun) -> Iterator[tuple[LanguageTask, SingleProcess]]:
    """Context in which a run's task computes losses in this process."""
    with arithmetic_of(tuned.device):
        with tuned.device.autocast():
            language = lay_out_for(unwrap(tuned.model))
        training, objective = measured_training(tuned.job), objective_of(tuned.job)
        task = LanguageTask(tuned.model, language, None, tuned.device.torch, training=training, objective=objective)
        yield task, SingleProcess(task, tuned.device, ())


def token_losses(tuned: TunedRun, rows: Sequence[Row]) -> list[np.ndarray]:
    """Returns the cross entropy in nats of each token of each row, shape (length,), float64; NaN where it is not
    trained.

    Their sum over rows divided by the number of trained tokens is the loss that `stoker eval` measures.

    Raises:
        UserError: the run's loss is not a mean over tokens.
    """
    check_token_losses(tuned.job, tuned.folder)
    found: list[np.ndarray] = []
    with measuring(tuned) as (task, engine):
        # Each pass numbers its padded rows from 0, so with padding every pass has one row.
        for group in grouped(rows, lambda row: len(row.ids), EVALUATION_TOKENS if task.language.packs else 0):
            (part,) = task.lay_out([Document(row, 0, i) for i, row in enumerate(group)])
            (losses_N,) = engine.read([part], _cross_entropy, 1)
            losses, rows_N = losses_N.cpu().double().numpy(), part.row.documents.cpu().numpy()
            found += [_at_its_tokens(row, losses[rows_N == i]) for i, row in enumerate(group)]
    return found


def _cross_entropy(hidden_ND: Tensor, inputs: Inputs, head: Head | LogitsHead) -> Tensor:
    return -head.scores(hidden_ND, inputs.targets).log_probability


def _at_its_tokens(row: Row, losses: np.ndarray) -> np.ndarray:
    """Returns the losses of a row's trained tokens at the places of those tokens."""
    values = np.full(len(row.ids), np.nan)
    values[1:][row.trained[1:]] = losses
    return values
