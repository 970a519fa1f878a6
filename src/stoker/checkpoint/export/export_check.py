"""Verifies that an export has the trained weights and answers, and measures the cost of its precision.

Three comparisons, each with its own tolerance:

1. Merging: the merged model's answers equal the trained model's, up to the rounding of float32.
2. Storing: every weight that is read back differs from the merged one by at most the rounding of its type
   (`stoker.checkpoint.export.rounding`). The change of held-out log-probabilities by these weights is the cost of the
   type.
3. Serving: the program that will serve the export answers as these weights do. transformers computes them in float32.
   llama.cpp rounds activations as well, which costs about as much as rounding the weights; see `allowed`.

Tokens, splitting rules, template and stop tokens must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.checkpoint.export.gguf_families import FAMILIES
from stoker.checkpoint.export.gguf_replay import GgufAnswers, ask_llamacpp
from stoker.checkpoint.export.reference_answers import ReferenceAnswers
from stoker.checkpoint.export.replay import ReplayAnswer, answer, answer_afresh, next_logits
from stoker.checkpoint.export.text_check import (
    check_gguf_stops,
    check_stops,
    check_texts,
    differently_spaced,
    left_out,
    texts_of_gguf,
)
from stoker.checkpoint.export.weights_check import stored_in_folder, stored_in_gguf, take_stored
from stoker.checkpoint.export.write_export import Export
from stoker.errors import RunFailed
from stoker.models.tuning.virtual_tokens import virtual_of

FLOAT32 = 1e-3  # largest difference of logits by the order of summation, relative to their standard deviation
EIGHT_BIT = 5e-2  # bitsandbytes rounds activations to 8 bits, so the smallest difference before becomes a whole step
GELU = 5e-3  # llama.cpp reads GELU from a table in float16: 7e-4 of the spread of random models with 2 blocks
# llama.cpp also rounds activations, in the same blocks as weights: about the same cost, and outliers cost more. SmolLM2
# under LoRA differs by 1.1 of the cost of q8_0 weights (34 held-out tokens).
ACTIVATIONS = 4.0
PARTING = 5.0  # allowed deviations between the logits of two tokens where greedy answers diverge


@dataclass(frozen=True)
class Verified:
    """The measurements of a verified export.

    Attributes:
        line: a summary.
        rows, tokens: number of scored rows and tokens.
        held_out: whether the rows were held out of training.
        before, after: mean loss of the tokens by the trained model and by the served export.
        cost: root mean square of the change of the tokens' log-probabilities by the stored weights.
        difference: the same change in the program that serves the export.
        allowed: upper bound of ``difference``.
    """

    line: str
    rows: int
    tokens: int
    held_out: bool
    before: float
    after: float
    cost: float
    difference: float
    allowed: float

    def as_json(self) -> dict[str, Any]:
        """Returns everything but the summary."""
        return {name: value for name, value in asdict(self).items() if name != "line"}


def verify(reference: ReferenceAnswers, model: nn.Module, export: Export, written: Path) -> Verified:
    """Reads an export back, replays it, and compares.

    Args:
        model: the run's own model; merged, unless the export is an adapter. It receives the stored weights.

    Raises:
        RunFailed: the export cannot be loaded, or its weights, answers, stop tokens or tokenizer differ.
    """
    expected: Sequence[ReplayAnswer] = reference.answers
    if export.format != "adapter":
        if not export.quantise:
            check_merged(reference, model)
            gguf = export.format == "gguf"
            take_stored(
                model, stored_in_gguf(model, written) if gguf else stored_in_folder(model, written, export.weights)
            )
        expected = answer(model, reference.questions, reference.stop_ids)
    if export.format == "gguf":
        return _verify_gguf(reference, expected, model, written)
    return _verify_folder(reference, expected, model, export, written)


def check_merged(reference: ReferenceAnswers, model: nn.Module) -> None:
    """Compares a merged model with the trained one."""
    merged = answer(model, reference.questions, reference.stop_ids)
    apart = distance(reference.answers, merged)
    if not apart <= FLOAT32:
        raise RunFailed(f"the merged model answers differently: {_apart(apart, FLOAT32)}")


def distance(ours: Sequence[ReplayAnswer], theirs: Sequence[ReplayAnswer]) -> float:
    """Returns the largest difference of logits, relative to their standard deviation."""
    pairs = zip(_same_width(ours, theirs), _same_width(theirs, ours), strict=True)
    apart = [float((a.logits - b.logits).abs().max() / a.logits.std()) for a, b in pairs]
    return max(apart, key=lambda value: math.inf if math.isnan(value) else value)


def _same_width(answers: Sequence[ReplayAnswer], others: Sequence[ReplayAnswer]) -> list[ReplayAnswer]:
    """Truncates logits to the width of the others: the trained model may have rows after its last token."""
    width = min(answer.logits.shape[1] for answer in others)
    return [replace(answer, logits=answer.logits[:, :width]) for answer in answers]


def _apart(found: float, allowed: float) -> str:
    return f"logits differ by {found:.2g} of their spread, {allowed:g} is allowed"


def _verify_folder(
    reference: ReferenceAnswers, expected: Sequence[ReplayAnswer], model: nn.Module, export: Export, written: Path
) -> Verified:
    own = replace(reference.request, base=None, dtype=None, quantisation=None)
    replayed, texts = answer_afresh(written, reference.request if export.format == "adapter" else own)
    check_texts(reference, texts, "transformers", (0,))
    check_stops(reference.stop_ids, written)
    expected, before = (_same_width(answers, replayed) for answers in (expected, reference.answers))
    tolerance = EIGHT_BIT if "8bit" in (reference.quantise, export.quantise) else FLOAT32
    apart = distance(expected, replayed)
    if not apart <= tolerance:
        raise RunFailed(f"the export answers differently: {_apart(apart, tolerance)}")
    trained, stored, served = (_scores(reference, answers) for answers in (before, expected, replayed))
    allowed = tolerance * float(torch.cat([a.logits for a in before]).std())
    try:
        _check_parting(reference, expected, [a.tokens for a in replayed], model, PARTING * allowed)
    except RunFailed:
        if virtual_of(model) is None:
            raise
        passes, _ = answer_afresh(written, replace(reference.request, cached=False))
        _check_parting(reference, expected, [a.tokens for a in passes], model, PARTING * allowed)
        raise RunFailed(
            f"the export answers as the run does, but peft {version('peft')} with transformers "
            f"{version('transformers')} generates other tokens from it; pip install 'transformers<5.24'"
        ) from None
    equal = sum(a.tokens == b.tokens for a, b in zip(before, replayed, strict=True))
    how = f"in a fresh process: {{}}logits within {apart:.1e} of their spread ({tolerance:g} allowed)"
    return _verified(reference, trained, stored, served, allowed, equal, how)


def _verify_gguf(
    reference: ReferenceAnswers, expected: Sequence[ReplayAnswer], model: nn.Module, written: Path
) -> Verified:
    """Verifies a GGUF file through llama.cpp where it is installed."""
    request = replace(reference.request, base=None, dtype="float32", quantisation=None)
    if find_spec("xllamacpp") is not None:
        got, program = ask_llamacpp(written, request), "llama.cpp"
    else:
        replayed, said = answer_afresh(written, request)
        scores = [a.scores(q).tolist() for a, q in zip(replayed, reference.questions, strict=True)]
        got = GgufAnswers([list(a.tokens) for a in replayed], scores, said.texts, said.rendered)
        program = "transformers (llama.cpp is not installed)"
    texts = texts_of_gguf(written, got.texts, got.rendered)
    skipped = differently_spaced(reference, written)
    check_texts(reference, texts, program, left_out(written, len(reference.start)), skipped=skipped)
    check_gguf_stops(reference.stop_ids, written)
    given = torch.tensor([score for scores in got.scores for score in scores])
    trained, stored = (_scores(reference, answers) for answers in (reference.answers, expected))
    cost, difference = _root_mean_square(stored - trained), _root_mean_square(given - stored)
    spread = float(torch.cat([a.logits for a in reference.answers]).std())
    family = FAMILIES[type(model).__name__]
    exact = FLOAT32 if "silu" in family.activations and family.ropes else GELU
    allowed = max(exact * spread, ACTIVATIONS * cost)
    if not difference <= allowed:
        raise RunFailed(
            f"the GGUF answers differently in {program}: log-probabilities of trained tokens differ by "
            f"{difference:.2g} (root mean square) from those of its own weights, {allowed:.2g} is allowed"
        )
    answers = [_until_stop(reference, tokens) for tokens in got.tokens]
    ours = [a.tokens[: len(b)] for a, b in zip(reference.answers, answers, strict=True)]
    _check_parting(reference, expected, answers, model, PARTING * allowed)
    equal = sum(a == b[: len(a)] for a, b in zip(ours, answers, strict=True))
    how = f"through {program}: {{}}log-probabilities within {difference:.1e} ({allowed:.1e} allowed)"
    return _verified(reference, trained, stored, given, allowed, equal, how)


def _verified(
    reference: ReferenceAnswers, trained: Tensor, stored: Tensor, served: Tensor, allowed: float, equal: int, how: str
) -> Verified:
    """Returns the measurements of an export, from the scores of the trained tokens by each model.

    Args:
        equal: number of greedy answers that equal the trained model's.
        how: a format string for the losses.
    """
    before, after = float(-trained.mean()), float(-served.mean())
    rows = len(reference.questions)
    noun = "row" if rows == 1 else "rows"
    kind = f"held-out {noun}" if reference.held_out else f"training {noun} (none are held out)"
    losses = f"loss {before:.4f} before, {after:.4f} after ({len(trained)} tokens); "
    answers = f"{equal} of {rows} greedy answers equal, tokens and template equal"
    line = f"replayed {rows} {kind} {how.format(losses)}, {answers}"
    cost, difference = _root_mean_square(stored - trained), _root_mean_square(served - stored)
    return Verified(
        line=line,
        rows=rows,
        tokens=len(trained),
        held_out=reference.held_out,
        before=before,
        after=after,
        cost=cost,
        difference=difference,
        allowed=allowed,
    )


def _scores(reference: ReferenceAnswers, answers: Sequence[ReplayAnswer]) -> Tensor:
    return torch.cat([a.scores(q) for a, q in zip(answers, reference.questions, strict=True)])


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def describe_drift(trained: Sequence[ReplayAnswer], quantised: Sequence[ReplayAnswer]) -> str:
    """Describes the difference between the quantised and the trained model's answers."""
    apart = [
        _root_mean_square(ours.logits - theirs.logits) / float(ours.logits.std())
        for ours, theirs in zip(trained, quantised, strict=True)
    ]
    equal = sum(a.tokens == b.tokens for a, b in zip(trained, quantised, strict=True))
    return (
        f"in fewer bits logits are {sum(apart) / len(apart):.1e} of their spread from the trained ones (root mean "
        f"square), {equal} of {len(apart)} greedy answers equal"
    )


def _until_stop(reference: ReferenceAnswers, tokens: Sequence[int]) -> tuple[int, ...]:
    """Cuts an answer after its first stop token; llama.cpp may continue after it."""
    stops = [i for i, token in enumerate(tokens) if token in reference.stop_ids]
    return tuple(tokens[: stops[0] + 1 if stops else None])


def _check_parting(
    reference: ReferenceAnswers,
    expected: Sequence[ReplayAnswer],
    answers: Sequence[Sequence[int]],
    model: nn.Module,
    allowed: float,
) -> None:
    """Raises RunFailed if greedy answers diverge where the logits of both tokens differ by more than ``allowed``."""
    for question, ours, theirs in zip(reference.questions, expected, answers, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs, strict=False)) if a != b), None)
        if parted is None:
            continue
        logits = next_logits(model, [*question.ids[: question.prompt], *ours.tokens[:parted]])
        apart = float(logits[ours.tokens[parted]] - logits[theirs[parted]])
        if not apart <= allowed:
            raise RunFailed(
                f"the export answers differently: token {theirs[parted]} instead of {ours.tokens[parted]}, whose "
                f"logit is {apart:.2g} higher, {allowed:.2g} is allowed"
            )
