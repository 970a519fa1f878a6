"""Lines about a language model's run that are printed and recorded before training starts."""

from __future__ import annotations

from stoker.hardware.process_device import Device
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.layout import Layout
from stoker.job.resolved import ResolvedJob
from stoker.models.language_model import LanguageModel
from stoker.models.text import TextSide
from stoker.models.tuning.quantise import describe_quantisation
from stoker.train.prepared import count_of

_CHUNKED = "chunked, trained positions only"


def language_facts(
    job: ResolvedJob, text: TextSide, language: LanguageModel, device: Device, layout: Layout, *, compiled: bool
) -> dict[str, str]:
    """Returns how rows, loss and weights are computed, by name."""
    facts = {
        "template": ", ".join(dict.fromkeys(_template(source, text) for source in job.data)),
        "rows": "packed; documents do not attend to each other" if language.packs else "padded, grouped by length",
        "loss": "over the model's own logits" if language.head is None and layout.pipeline == 1 else _CHUNKED,
    }
    quantised = describe_quantisation(job, device, layout, language.model)
    if quantised is not None:
        facts["base"] = quantised
    if job.train.float8 != "none":
        facts["float8"] = f"{job.train.float8}, {_pace_of_float8(device, compiled=compiled)}"
    if compiled:
        facts["compiled"] = "each block, in the first step"
    return facts


def _template(source: SourceBlock, text: TextSide) -> str:
    if source.template != "auto":
        return source.template if isinstance(source.template, str) else "the job's texts for each role"
    return "the tokenizer's own" if text.own_template else "plain (the tokenizer has none)"


def describe_left_out(parameters: int) -> str:
    """Returns what happens to the parameters of an image-text model outside of its language model."""
    return f"{count_of(parameters)} parameters, not loaded: only text is trained, and a merged export contains them"


def _pace_of_float8(device: Device, *, compiled: bool) -> str:
    if device.type == "cpu":
        return "imitated on this processor, which is slower than no float8"
    return "compiled" if compiled else "not compiled, which is slower than no float8: see `train.compile`"


def describe_new_rows(job: ResolvedJob, tokens: int) -> str:
    """Returns how the embeddings of new tokens start, and whether they are trained first."""
    words = f"{tokens:,}, each embedding starts as the mean of the embeddings of the token's former pieces"
    first = job.tune.new_rows_first
    return f"{words}; for {first} steps only they are trained" if first else words
