"""The model card of an export: base, data, settings, losses and versions, without local paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.files import read_file
from stoker.job.keys.tune_keys import KEYS
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.models import offline_models
from stoker.models.hf_config import IMAGE_TEXT
from stoker.models.model_files import is_chatglm
from stoker.models.model_source import find_model
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.packed_experts import has_packed_experts
from stoker.models.tuning.quantise import FORMS, is_quantised
from stoker.node_cache.urls import is_url, without_secrets

if TYPE_CHECKING:
    from stoker.checkpoint.load_run import TunedRun

HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a folder of huggingface_hub's cache
# The settings of ``train``, and those of ``tune`` that its method has.
SETTINGS = ("lr", "schedule", "warmup", "batch", "seq_len", "optimizer", "weight_decay", "clip", "precision")
TUNING = ("rank", "alpha", "dropout", "targets", "rslora", "dora", "tokens", "deep")

SCORED = (
    "The score is that of the token that ends the answer. transformers takes the score of a row's last token, so "
    "remove what the chat template writes after the answer's end, such as a line break: "
    "`tokenizer.apply_chat_template(messages, tokenize=False).rstrip()`."
)


@dataclass(frozen=True)
class BaseName:
    """The public name of a base.

    Attributes:
        name: a hub id, or the local name without its folders.
        local: whether the name exists on this machine only.
        remark: differences of the base from the model of that name.
        converted: whether the base has ChatGLM's format.
        catalogue: name of the base in the offline catalogue, if the hub id has other weights; else empty.
        licence: its SPDX identifier; empty if unknown.
    """

    name: str
    local: bool = False
    remark: str = ""
    converted: bool = False
    catalogue: str = ""
    licence: str = ""

    @property
    def warning(self) -> str | None:
        """A warning to the users of the export, if the name is local."""
        if not self.local:
            return None
        what = "at a URL" if is_url(self.name) else "a folder or file of this machine"
        return (
            f"the base is {what}, {self.name}, and no hub id: whoever loads this needs the "
            "same weights, and gives their place"
        )


def public_name(job: ResolvedJob, base: Path) -> BaseName:
    """Returns the hub id of a job's base where it has one."""
    assert job.model is not None
    name = job.model.name
    if name in offline_models.PACKAGED and (source := find_model(name, base)) is not None and source.kind == "gguf":
        packaged = offline_models.PACKAGED[name]
        remark = f"trained on the weights of the package {packaged.distribution}: {packaged.about}"
        return BaseName(packaged.hub, remark=remark, catalogue=name, licence=packaged.licence)
    source = find_model(name, base)
    converted = source is not None and not job.model.trust_remote_code and is_chatglm(source, job.model.revision)
    if source is None or source.kind == "hub":
        return BaseName(name, converted=converted)
    if source.kind == "scratch":
        return BaseName(name, local=True, remark="trained from random weights")
    if is_url(name):
        return BaseName(without_secrets(name), local=True, converted=converted)
    cached = HUB_CACHE.search(source.where)
    if cached:
        return BaseName(f"{cached[1]}/{cached[2]}", converted=converted)
    given = Path(name)
    inside = not given.is_absolute() and not {"..", "~"} & set(given.parts)
    # The dot makes it a path for every loader, and never another model of that name on the hub.
    return BaseName(f"./{given if inside else Path(source.where).name}", local=True, converted=converted)


def warnings_of(job: ResolvedJob, form: str, base: BaseName, model: Any) -> list[str]:
    """Returns what users of an export must know about its base, which only an adapter needs."""
    if form != "adapter":
        return []
    found = [] if base.warning is None else [base.warning]
    assert job.model is not None
    if base.catalogue:
        found.append(
            f"the adapter was trained over {base.catalogue} of the offline catalogue, and {base.name} on the hub has "
            "other weights: programs other than Stoker need an export with --format merged"
        )
    if base.converted:
        found.append(
            "Stoker reads the base as transformers' Glm, whose names the adapter has: programs other than Stoker need "
            "an export with --format merged"
        )
    if is_quantised(job):
        held = FORMS[job.model.quantise]
        found.append(
            f"the adapter was trained over a base in {held.description}: load the base with "
            f"quantization_config={held.loading_of(unwrap(model))}"
        )
        if has_packed_experts(model):
            found.append(
                "experts of the base without an adapter were in 4 bits, too: call "
                "bitsandbytes.nn.parametrize.replace_parameter_4bit(experts, name, compress_statistics=True, "
                'quant_type="nf4") for the parameters of each block\'s experts'
            )
    return found


def write_card(tuned: TunedRun, form: str, base: Path, folder: Path) -> None:
    """Writes ``README.md`` into an export's folder."""
    found = public_name(tuned.job, base)
    (folder / "README.md").write_text("\n".join([*_head(tuned, form, found), *_body(tuned, form, found)]) + "\n")


def _sees_images(tuned: TunedRun) -> bool:
    """Returns whether the export has an image-text model around the language model that was trained."""
    return unwrap(tuned.model).config.model_type in IMAGE_TEXT


def _head(tuned: TunedRun, form: str, base: BaseName) -> Iterator[str]:
    """Yields the YAML header for the hub."""
    yield "---"
    if not base.local:
        yield f"base_model: {base.name}"
    yield f"library_name: {'peft' if form == 'adapter' else 'gguf' if form == 'gguf' else 'transformers'}"
    yield f"license: {base.licence.lower() or 'unknown'}"
    kind = "image-text-to-text" if _sees_images(tuned) else "text-generation"
    yield f"pipeline_tag: {'text-classification' if task_of(tuned.job).model.head == 'score' else kind}"
    yield f"tags:\n- {tuned.job.task}\n- {tuned.job.tune.method}\n---"


def _body(tuned: TunedRun, form: str, base: BaseName) -> Iterator[str]:
    job, events = tuned.job, tuned.folder.read_events()
    method = "all weights trained" if job.tune.method == "full" else f"tuned by {job.tune.method}"
    yield f"# {tuned.folder.path.name}"
    weights = "averaged weights, " if tuned.averaged else ""
    yield f"\n{base.name}, {method}, {weights}step {tuned.step}, written by Stoker as {form}."
    if _sees_images(tuned):
        yield "\nOnly the language model was trained, on text. The other weights are those of the base."
    for warning in warnings_of(job, form, base, tuned.model):
        yield f"\n**{warning[0].upper()}{warning[1:]}.**"
    if task_of(job).model.head == "score":
        yield f"\n{SCORED}"
    if base.remark:
        yield f"\n{base.remark[0].upper()}{base.remark[1:]}."
    yield f"\nLicence of the base: {base.licence or 'unknown'}. The data have theirs."
    yield "\n## Data\n\n| source | rows | tokens | share | epochs |\n| --- | --- | --- | --- | --- |"
    yield from _sources(tuned, events)
    yield "\n## Settings\n\n| setting | value |\n| --- | --- |"
    yield from (f"| {name} | {value} |" for name, value in _settings(tuned))
    yield "\n## Losses\n"
    if tuned.averaged:
        yield "These are losses of the weights of single steps, not of their average.\n"
    yield "| | before | after |\n| --- | --- | --- |"
    yield from (f"| {name} | {_figure(first)} | {_figure(last)} |" for name, first, last in _losses(tuned, events))
    yield "\n## Versions\n\n| package | version |\n| --- | --- |"
    yield from (f"| {name} | {version} |" for name, version in _versions(tuned).items() if version)


def _sources(tuned: TunedRun, events: list[dict[str, Any]]) -> Iterator[str]:
    """Yields what each source gave up to the exported step, as its part of the whole run, which events have."""
    start = next((event for event in reversed(events) if event.get("sources")), None)
    if start is None:
        return
    done = tuned.step / start["steps"]
    for part in start["sources"]:
        counts = f"{round(part['rows'] * done):,} | {round(part['tokens'] * done):,} | {part['share']:.1%}"
        yield f"| {_name(part['name'])} | {counts} | {part['epochs'] * done:.2f} |"


def _name(source: str) -> str:
    return Path(source).name if Path(source).is_absolute() else source


def _settings(tuned: TunedRun) -> Iterator[tuple[str, Any]]:
    job = tuned.job
    yield "task", job.task
    yield "method", job.tune.method
    for name in (name for name in TUNING if name in KEYS[job.tune.method]):
        value = getattr(job.tune, name)
        if value not in (False, 0.0):
            yield name, ", ".join(value) if isinstance(value, list) else value
    yield "steps", tuned.step
    yield from ((name, getattr(job.train, name)) for name in SETTINGS)
    yield "seed", job.seed


def _figure(loss: float | None) -> str:
    """Formats a loss; runs store one that is not finite as None."""
    return "not finite" if loss is None else f"{loss:.4f}"


def _losses(tuned: TunedRun, events: list[dict[str, Any]]) -> Iterator[tuple[str, float | None, float | None]]:
    """Yields (rows, first loss, last loss) of the training rows and the held-out ones, up to the exported step."""
    steps = [line["loss"] for line in tuned.folder.read_metrics() if line["step"] <= tuned.step]
    if steps:
        yield "training rows, first and last step", steps[0], steps[-1]
    held_out = [e["loss"] for e in events if e.get("event") == "evaluated" and e.get("step", 0) <= tuned.step]
    if held_out:
        yield "held-out rows", held_out[0], held_out[-1]


def _versions(tuned: TunedRun) -> dict[str, str | None]:
    try:
        found: dict[str, str | None] = json.loads(read_file(tuned.folder.environment))["versions"]
    except (OSError, ValueError, KeyError):
        return {}
    return found
