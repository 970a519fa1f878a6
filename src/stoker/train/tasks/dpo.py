"""``dpo``: training on pairs of answers, or on judged ones, without a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stoker.job.block import Auto, Block, Text
from stoker.job.task_spec import (
    BlockSpec,
    Decided,
    ModelSpec,
    Named,
    RowKind,
    RowSpec,
    TaskSpec,
    WorkSpec,
    block_of_task,
)
from stoker.train.language.language_training import LanguageTraining

if TYPE_CHECKING:
    from stoker.errors import Problem
    from stoker.job.conflicts.conflict_view import View
    from stoker.job.load_job import LoadedJob
    from stoker.job.schema import Job
    from stoker.models.objective import Objective
    from stoker.train.language.batch_extras import BatchExtras

KINDS = ("auto", "none", "adapter-off", "precomputed")  # kinds of reference; any other value names a model
WITHOUT_REFERENCE = ("simpo", "orpo")
SMOOTHED = ("sigmoid", "robust", "simpo")
BETAS = {
    "simpo": Decided(2.0, "SimPO's rewards are means over tokens and take a larger factor (its section 4)"),
}


class DpoBlock(Block):
    """Comparison of answers: the loss and its reference."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "kto"] = Field(
        default="sigmoid",
        description="sigmoid (DPO); ipo; hinge (SLiC); robust (to wrong labels); simpo and orpo (no reference); kto "
        "(single answers with a label, good or bad)",
    )
    beta: Annotated[float, Field(gt=0)] | Auto = Field(
        default="auto",
        description="factor of the rewards, which keeps the policy near the reference; orpo: weight of the odds ratio",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="assumed fraction of wrong labels"
    )
    length_normalise: bool | Auto = Field(
        default="auto", description="divide an answer's log-probability by its number of tokens"
    )
    sft_weight: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto", description="weight of the chosen answer's mean cross entropy over its tokens"
    )
    margin: Annotated[float, Field(ge=0)] | Auto = Field(
        default="auto", description="simpo: target margin between the rewards (gamma)"
    )
    good_weight: Annotated[float, Field(gt=0)] = Field(default=1.0, description="kto: weight of good answers")
    bad_weight: Annotated[float, Field(gt=0)] = Field(default=1.0, description="kto: weight of bad answers")
    reference: Text = Field(
        default="auto",
        description="adapter-off (the model without its adapter, one more forward pass); precomputed (with the "
        "initial weights, once before training); another model: hub id, folder or run; or none (all losses but kto)",
    )


class ResolvedDpoBlock(DpoBlock):
    """The block without ``auto``, except for a reference of that name."""

    beta: float
    length_normalise: bool
    sft_weight: float
    margin: float


def _block(job: Job) -> DpoBlock:
    return job.dpo or DpoBlock()  # type: ignore[attr-defined]


def _defaults(job: Job) -> dict[str, Decided]:
    block = _block(job)
    lengths = {
        "ipo": "as IPO's authors computed it",
        "simpo": "SimPO's reward is a mean over tokens",
        "orpo": "ORPO's odds are of the mean over tokens",
    }
    found = {
        "train.lr": Decided(1e-6, "full tuning of trained weights; preferences move them little"),
        "dpo.beta": BETAS.get(block.loss, Decided(0.1, "the usual choice")),
        "dpo.length_normalise": Decided(block.loss in lengths, lengths.get(block.loss, "an answer's reward is a sum")),
        "dpo.sft_weight": Decided(1.0, "a part of ORPO's loss") if block.loss == "orpo" else Decided(0.0, "none"),
        "dpo.margin": Decided(0.0, "only for simpo"),
        "dpo.reference": _reference(job, block),
    }
    if block.loss == "simpo":
        found["dpo.margin"] = Decided(1.0, "half of beta's default (SimPO's section 4)")
    return found


def _reference(job: Job, block: DpoBlock) -> Decided:
    from stoker.job.keys.tune_keys import ADAPTERS

    if block.loss in WITHOUT_REFERENCE:
        return Decided("none", f"{block.loss} compares answers without one")
    if job.tune.method not in ADAPTERS:
        return Decided("precomputed", "the first weights are gone after the first step, and a copy would take memory")
    if job.tune.modules_to_save:
        return Decided("precomputed", "modules are trained whole, which switching the adapter off does not undo")
    return Decided("adapter-off", "the base is in memory anyway")


def _row_kind(job: Job) -> RowKind:
    return "judged" if _block(job).loss == "kto" else "pairs"


def _names(job: Job) -> tuple[Named, ...]:
    named = _block(job).reference
    return () if named in KINDS else (Named("dpo.reference", named, "model"),)


def _of_other_losses(view: View) -> Iterator[Problem]:
    loss = view.value("dpo.loss")
    kto, simpo = (loss == "kto"), (loss == "simpo")
    for key, unused, right, losses in (
        ("margin", 0.0, simpo, "simpo"),
        ("good_weight", 1.0, kto, "kto"),
        ("bad_weight", 1.0, kto, "kto"),
        ("label_smoothing", 0.0, loss in SMOOTHED, ", ".join(SMOOTHED)),
    ):
        if view.value(f"dpo.{key}") not in ("auto", unused) and not right:
            message = f"`dpo.{key}` has no effect with `loss: {loss}`"
            yield from view.at_each([f"dpo.{key}", "dpo.loss"], message, f"remove it; it belongs to {losses}")
    if loss == "robust" and view.value("dpo.label_smoothing") == 0:
        message = "`loss: robust` without `label_smoothing` is `loss: sigmoid`"
        yield from view.at_each(["dpo.loss"], message, "write label_smoothing: 0.1")
    if loss in WITHOUT_REFERENCE and view.value("dpo.length_normalise") is False:
        message = f"`loss: {loss}` is defined on means over tokens"
        yield from view.at_each(["dpo.length_normalise", "dpo.loss"], message, "remove `length_normalise`")
    if kto and view.given("dpo.sft_weight") and view.value("dpo.sft_weight"):
        message = "`loss: kto` has no chosen answer beside a rejected one, so `sft_weight` has no effect"
        yield from view.at_each(["dpo.sft_weight", "dpo.loss"], message, "remove it")


def _references(view: View) -> Iterator[Problem]:
    from stoker.job.keys.tune_keys import ADAPTERS

    loss, named, method = view.value("dpo.loss"), view.value("dpo.reference"), view.value("tune.method")
    keys = ["dpo.reference", "dpo.loss"]
    if loss in WITHOUT_REFERENCE and view.given("dpo.reference") and named != "none":
        yield from view.at_each(keys, f"`loss: {loss}` compares answers without a reference", "remove `reference`")
    elif loss == "kto" and named == "none":
        yield from view.at_each(keys, f"`loss: {loss}` compares answers with a reference", "remove `reference`")
    elif named == "adapter-off" and method not in ADAPTERS:
        message = f"`tune: {method}` has no adapter to switch off"
        yield from view.at_each(["dpo.reference", "tune.method"], message, "write `reference: precomputed`")
    elif named == "adapter-off" and view.value("tune.modules_to_save"):
        message = "modules that are trained whole are not those of the reference when the adapter is off"
        yield from view.at_each(["dpo.reference", "tune.modules_to_save"], message, "write `reference: precomputed`")


def _objective(job: Job) -> Objective:
    from stoker.train.preference.preference_objective import PreferenceObjective

    return PreferenceObjective(block_of_task(job, ResolvedDpoBlock))


def _extras(loaded: LoadedJob, base: Path) -> BatchExtras:
    from stoker.train.preference.reference_scores import ReferenceScores

    return ReferenceScores(loaded, base, block_of_task(loaded.job, ResolvedDpoBlock))


def _reads(job: Job) -> int:
    """Counts the extra passes: the reference's, and for KTO those of mismatched answers on policy and reference."""
    block = _block(job)
    off = (block.reference if block.reference != "auto" else _reference(job, block).value) == "adapter-off"
    return off + (1 + off) * (block.loss == "kto")


def _roles(job: Job) -> tuple[str, ...]:
    block = _block(job)
    named = block.reference if block.reference != "auto" else _reference(job, block).value
    others = {"adapter-off": ("reference",), "none": ()}
    return ("policy", *others.get(named, ("log-probabilities of the reference",)))


def _toy_keys(job: Job) -> dict[str, Any]:
    return {"reference": "precomputed"} if _names(job) else {}


TASK = TaskSpec(
    name="dpo",
    defaults=_defaults,
    adapter_lr=Decided(1e-5, "preferences move an adapter little; ten times the rate of full tuning"),
    block=BlockSpec(
        written=DpoBlock,
        resolved=ResolvedDpoBlock,
        reasons={
            "loss": "DPO, the usual choice",
            "label_smoothing": "all labels are assumed to be correct",
            "good_weight": "good and bad answers have the same weight",
            "bad_weight": "good and bad answers have the same weight",
        },
        examples={"reference": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        checks=(_of_other_losses, _references),
        toy_keys=_toy_keys,
    ),
    names=_names,
    rows=RowSpec(kind=_row_kind),
    model=ModelSpec(dropout=False),
    work=WorkSpec(roles=_roles, reads=_reads),
    language=LanguageTraining(objective=_objective, extras=_extras, target="pair", perplexity=False),
)
