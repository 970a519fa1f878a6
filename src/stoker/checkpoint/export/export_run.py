"""Exports a run: writes its weights in another form, verifies them, and says what users of the export must know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.checkpoint.export.export_check import EIGHT_BIT, Verified, check_merged, describe_drift, verify
from stoker.checkpoint.export.image_text_export import with_image_part
from stoker.checkpoint.export.model_card import public_name, warnings_of
from stoker.checkpoint.export.reference_answers import take_reference
from stoker.checkpoint.export.replay import answer
from stoker.checkpoint.export.score_export import (
    TOLERANCE,
    ScoreRequest,
    furthest,
    replay_scores,
    replayed_rows,
    scores_alone,
)
from stoker.checkpoint.export.weights_check import check_quantised_weights
from stoker.checkpoint.export.write_export import DTYPES, Export, base_of, check_export, merged_model, write_export
from stoker.checkpoint.load_run import TunedRun
from stoker.errors import RunFailed
from stoker.job.task_spec import task_of
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.packed_experts import has_packed_experts
from stoker.models.tuning.quantise import quantisation, quantised_copy

MUCH_WORSE = 0.1  # of the loss, by the GGUF file's precision: a perplexity 10 % higher
REPLAYING = "comparing what a fresh process computes from it"


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        written: the folder, or the GGUF file.
        drift: a sentence on the change of the answers by quantisation; empty without it.
        base: the name of the base in the export.
        warnings: what users of the export must know about the base.
    """

    written: Path
    verified: Verified
    drift: str
    base: str
    warnings: list[str]


def export_run(
    tuned: TunedRun, export: Export, base: Path, say: Callable[[str], None] = lambda stage: None
) -> Exported:
    """Writes a run's export and verifies it; consumes the run's own model.

    Args:
        say: called with the name of each stage when it begins.

    Raises:
        UserError: the export is impossible.
        RunFailed: the written files differ from the training; they are then in ``TO.differs``.
    """
    check_export(tuned, export)
    if task_of(tuned.job).model.head == "score":
        return _export_scores(tuned, export, base, say)
    say("computing the run's own answers")
    reference = take_reference(tuned, base)
    lost: list[str] = []
    if export.format != "adapter":
        say("merging")
        tuned = replace(tuned, model=merged_model(tuned.model))
    if export.format == "merged":
        tuned = with_image_part(tuned, base)
    whole: Any = tuned.model
    if export.quantise:
        say(f"quantising to {export.quantise}")
        tuned = replace(tuned, model=quantised_copy(whole, export.quantise, DTYPES[export.weights]).eval())
    found: list[Verified] = []

    def check(written: Path) -> None:
        say(REPLAYING)
        if export.quantise:
            check_merged(reference, whole)
            check_quantised_weights(whole, tuned.model, export.quantise, export.weights)
            held = tuple(answer(tuned.model, reference.questions, reference.stop_ids))
            lost.append(describe_drift(reference.answers, held))
        found.append(verify(reference, tuned.model, export, written))

    say(f"writing {export.format} to {export.to}")
    written = write_export(tuned, export, base, check)
    return _exported(tuned, export, base, written, found[0], drift="".join(lost))


def _exported(
    tuned: TunedRun, export: Export, base: Path, written: Path, verified: Verified, *, drift: str = ""
) -> Exported:
    """Returns a finished export, with what its users must know about the base."""
    name = public_name(tuned.job, base)
    warnings = warnings_of(tuned.job, export.format, name, tuned.model)
    worse = verified.after - verified.before
    if export.format == "gguf" and worse > MUCH_WORSE:
        warnings.append(
            f"in {export.weights} the loss is higher by {worse:.2f}: export in more bits, such as q5_1 or q8_0"
        )
    return Exported(written, verified, drift, name.name, warnings)


def _export_scores(tuned: TunedRun, export: Export, base: Path, say: Callable[[str], None]) -> Exported:
    """Exports a reward model, and compares its scores in a fresh process with those of the run."""
    assert tuned.job.model is not None
    quantise, model = tuned.job.model.quantise, unwrap(tuned.model)
    settings = quantisation(quantise, model.dtype, model=model)
    request = ScoreRequest(replayed_rows(tuned, base))
    if export.format == "adapter":
        dtype, bits = str(model.dtype).removeprefix("torch."), settings.to_dict() if settings is not None else None
        packs = has_packed_experts(model)
        request = replace(request, base=base_of(tuned, base), dtype=dtype, quantisation=bits, packs_experts=packs)
    if settings is None:
        tuned.model.float()
    rows = request.rows
    say("computing the run's own scores")
    before, after = scores_alone(model, rows), list[float]()
    computed = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
    allowed = max(EIGHT_BIT if quantise == "8bit" else 0.0, TOLERANCE[export.weights if settings is None else computed])

    def check(written: Path) -> None:
        say(REPLAYING)
        after.extend(replay_scores(written, request))
        apart = furthest(before, after)
        if not apart <= allowed:
            raise RunFailed(
                f"the export scores differently: by {apart:.2g} of the scores' size, {allowed:g} is allowed"
            )

    say(f"writing {export.format} to {export.to}")
    written = write_export(tuned, export, base, check)
    apart = furthest(before, after)
    line = (
        f"scored {len(rows)} answers in a fresh process, in one padded batch: within {apart:.1e} ({allowed:g} allowed)"
    )
    means = sum(before) / len(rows), sum(after) / len(rows)
    found = Verified(
        line, len(rows), sum(map(len, rows)), bool(tuned.job.evaluate.fraction), *means, apart, apart, allowed
    )
    return _exported(tuned, export, base, written, found)
