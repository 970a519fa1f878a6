"""Pretraining mix of a policy, trained beside its answers (PPO-ptx, from InstructGPT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stoker.data.corpus import Corpus, open_corpus
from stoker.errors import UserError
from stoker.job.load_job import LoadedJob
from stoker.job.resolved import ResolvedSource
from stoker.models.text import TextSide
from stoker.train.rollouts.policy_block import PtxBlock
from stoker.train.rollouts.policy_objective import PTX
from stoker.train.task import Part

if TYPE_CHECKING:
    from stoker.train.engine import Engine
    from stoker.train.language.language_task import LanguageTask


@dataclass(frozen=True)
class PretrainingMix:
    """Sequences that are trained beside the answers of each step.

    Attributes:
        sequences: sequences per step.
        batch: answers per step.
    """

    corpus: Corpus
    sequences: int
    batch: int

    def parts(self, task: LanguageTask, first: int, last: int) -> list[Part]:
        """Returns the forward passes that belong to samples first .. last-1 of the run, on the host.

        Their loss is over the policy's targets, so they have no own ones. The routers' auxiliary loss is in the
        policy's passes.
        """
        begin, end = (self.sequences * sample // self.batch for sample in (first, last))
        documents = [document for number in range(begin, end) for document in self.corpus.sequences[number]]
        rows = [(document.row.ids, document.row.trained) for document in documents]
        laid_out = task.language.lay_out(rows, torch.device("cpu")) if rows else []
        given = [{PTX: torch.ones(len(inputs.targets))} for inputs in laid_out]
        inputs = [replace(each, given=own, balance=0.0) for each, own in zip(laid_out, given, strict=True)]
        return [Part(each, targets=0, tokens=each.tokens) for each in inputs]

    @staticmethod
    def scaled(parts: Sequence[Part], engine: Engine, targets: int) -> list[Part]:
        """Scales the parts so that their sum over the step, divided by the policy's targets, is a mean; a collective.

        Args:
            targets: the policy's targets in the whole step.
        """
        counted = [replace(part, targets=len(part.row.targets)) for part in parts]
        scale = targets / max(1, engine.count(counted).targets)
        given = [{PTX: part.row.given[PTX] * scale} for part in parts]
        return [replace(p, inputs=replace(p.row, given=g)) for p, g in zip(parts, given, strict=True)]


def open_mix(block: PtxBlock, loaded: LoadedJob, base: Path, text: TextSide) -> PretrainingMix:
    """Opens the sequences of a job's block.

    Raises:
        UserError: the source cannot be read, or has nothing to train on; the error names the key's place.
    """
    job = loaded.job
    key = f"{job.task}.ptx.data"
    source = ResolvedSource(path=block.data, too_long="split", stream=False)
    alone = job.model_copy(
        update={
            "task": "sft",
            "data": [source],
            "evaluate": job.evaluate.model_copy(update={"data": [], "fraction": 0.0}),
            "train": job.train.model_copy(update={"pack": False}),
        }
    )
    with loaded.errors_at(key):
        corpus = open_corpus(alone, text.codec, seq_len=job.train.seq_len, base=base)
    if not corpus.sequences.total(1):
        raise UserError(loaded.problem(key, f"nothing in {block.data} can be trained on", "see `stoker data` on it"))
    return PretrainingMix(corpus, block.sequences or job.train.batch, job.train.batch)
