"""Calibration of a reward model: predicted probabilities of pairs against outcomes, by source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker.data.sequences import Document
from stoker.train.engine import Engine
from stoker.train.language.language_task import LanguageTask
from stoker.train.preference.reward_objective import answer_scores

BINS = 10  # of equal width, between 1/2 and 1


def calibration(
    task: LanguageTask, engine: Engine, documents: Sequence[Document], names: Sequence[str]
) -> dict[str, Any]:
    """Returns, for each source, accuracy, mean margin, bins of pairs, and expected calibration error (Guo et al.,
    2017).

    Args:
        documents: pairs, the chosen answer first.
        names: names of the sources that documents refer to by number.
    """
    found = []
    for number in sorted({document.source for document in documents}):
        parts = list(task.evaluation_parts([d for d in documents if d.source == number]))
        scores = torch.cat(engine.read(parts, answer_scores, len(parts))).cpu().double().view(-1, 2)
        found.append({"source": names[number], **_of_source(scores[:, 0] - scores[:, 1])})
    return {"calibration": found}


def _of_source(differences_P: torch.Tensor) -> dict[str, Any]:
    right_P, predicted_P = (differences_P > 0).double(), differences_P.abs().sigmoid()
    bin_P = ((predicted_P - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    bins, error = [], 0.0
    for number in sorted(set(bin_P.tolist())):
        here = bin_P == number
        predicted, right = float(predicted_P[here].mean()), float(right_P[here].mean())
        bins.append({"pairs": int(here.sum()), "predicted": predicted, "right": right})
        error += int(here.sum()) / len(bin_P) * abs(predicted - right)
    return {
        "pairs": len(differences_P),
        "accuracy": float(right_P.mean()),
        "margin": float(differences_P.mean()),
        "error": error,
        "bins": bins,
    }
