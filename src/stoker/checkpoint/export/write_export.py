"""Exports for peft, transformers and llama.cpp, including the chat template and the stop tokens.

An export is written under a temporary name, read back, replayed in a fresh process by the program that will serve it,
and renamed when its weights and answers are those of the training; see `stoker.checkpoint.export.export_check`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from stoker.checkpoint.export.adapter_export import keep_rows, save_adapter
from stoker.checkpoint.export.gguf_families import READ_BY_TRANSFORMERS, gguf_problem
from stoker.checkpoint.export.gguf_tokenizer import gguf_tokenizer
from stoker.checkpoint.export.gguf_writer import Dtype, write_gguf
from stoker.checkpoint.export.image_text_export import (
    check_image_text,
    copy_processor,
    name_in_image_text,
)
from stoker.checkpoint.export.model_card import public_name, write_card
from stoker.checkpoint.export.score_export import as_classifier, check_classifier, padding_of, save_score_adapter
from stoker.checkpoint.load_run import TunedRun
from stoker.data.text_codec import TextCodec
from stoker.errors import Problem, RunFailed, UserError
from stoker.files import check_new_folder
from stoker.job.keys.tune_keys import VIRTUAL
from stoker.job.resolution.batch_triangle import is_scratch
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import task_of
from stoker.models.model_files import weights_of
from stoker.models.model_source import find_model
from stoker.models.offline_models import BASE_FILE
from stoker.models.prepare_architecture import saved_form
from stoker.models.tokenizers.job_tokenizer import extension_of
from stoker.models.tuning.adapters import unwrap
from stoker.models.tuning.quantise import quantisation, quantised_copy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Format = Literal["adapter", "merged", "gguf"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GGUF_DTYPES: dict[str, Dtype] = {
    "fp32": "f32",
    "fp16": "f16",
    "q8_0": "q8_0",
    "q5_1": "q5_1",
    "q5_0": "q5_0",
    "q4_1": "q4_1",
    "q4_0": "q4_0",
}
K_QUANTS = {"q2": "q4_0", "q3": "q4_0", "q4": "q4_1", "q5": "q5_1", "q6": "q8_0"}  # bits -> the nearest other type


@dataclass(frozen=True)
class Export:
    """The settings of an export.

    Attributes:
        format: ``adapter`` (peft), ``merged`` (transformers) or ``gguf`` (llama.cpp).
        to: the folder to write.
        dtype: dtype of the weights; None for the format's default.
        quantise: quantisation of the linear layers of ``merged``, as in ``model.quantise``; None for unquantised.
    """

    format: Format
    to: Path
    dtype: str | None = None
    quantise: str | None = None

    @property
    def weights(self) -> str:
        """Dtype of the written weights."""
        return self.dtype or ("fp16" if self.format == "gguf" else "fp32")


def check_request(job: ResolvedJob, export: Export) -> None:
    """Rejects an export that is impossible by its job, before a model is loaded.

    Raises:
        UserError: the target exists, or the format, the data type or quantisation does not fit the job.
    """
    check_new_folder(export.to)
    task, method = task_of(job), job.tune.method
    assert job.model is not None
    if export.format not in task.exports:
        wanted = " or ".join(task.exports)
        raise UserError(f"task {job.task} is not exported as {export.format}: write {wanted}")
    if export.format == "adapter" and method == "full":
        raise UserError("this run trained all weights, so there is no adapter: write --format merged")
    if export.format == "adapter" and is_scratch(job):
        message = f"{job.model.name} begins from random weights, so nobody who loads an adapter has its base"
        hint = "name a model with weights in a new job" if method in VIRTUAL else "write --format merged"
        raise UserError(Problem(message, hint))
    if export.format == "adapter" and export.dtype:
        raise UserError("an adapter keeps the precision it was trained in: leave --dtype out")
    if export.format != "adapter" and method in VIRTUAL:
        raise UserError(f"{method} changes no weight, so there is nothing to merge: write --format adapter")
    if export.format == "adapter" and job.model.config:
        why = "an adapter is loaded with its base's own config.json, which has no changes of model.config"
        hint = "write --format merged, or train on a copy of the base whose config.json has the changes"
        raise UserError(Problem(why, hint))
    known = GGUF_DTYPES if export.format == "gguf" else DTYPES
    if export.format == "gguf" and (found := re.fullmatch(r"(q[2-6])_k(_[sml])?", export.weights.lower())):
        message = f"--dtype {export.dtype}: K-quants are written by llama.cpp's own quantiser only"
        nearest = K_QUANTS[found[1]]
        command = f"llama-quantize FILE OUT {export.weights.upper()}"
        raise UserError(Problem(message, f"export as {nearest}, or as fp16 and then run: {command}"))
    if export.dtype and export.dtype not in known:
        raise UserError(f"--dtype {export.dtype}: {export.format} takes {', '.join(known)}")
    if export.quantise and export.format != "merged":
        raise UserError(f"--quantise {export.quantise} is for merged weights: write --format merged")
    if export.quantise and task.model.head == "score":
        raise UserError(f"--quantise {export.quantise}: reward models are exported in fp32, bf16 or fp16")
    if export.format != "adapter" and job.model.quantise != "none":
        raise UserError(
            "the base is quantised, and merging into it would round the tuning away: write --format adapter"
        )


def check_export(tuned: TunedRun, export: Export) -> None:
    """Rejects impossible exports before anything is written.

    Raises:
        UserError: see `check_request`; or the format does not fit the model or its tokenizer, or lacks a package.
    """
    check_request(tuned.job, export)
    model = unwrap(tuned.model)
    if task_of(tuned.job).model.head == "score":
        check_classifier(model)
    # A model from scratch has never been saved, so its configuration does not name its class yet.
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if export.format == "gguf" and (problem := gguf_problem(config)):
        raise UserError(f"this model cannot become a GGUF file: {problem}")
    if export.format == "gguf" and find_spec("xllamacpp") is None and type(model).__name__ not in READ_BY_TRANSFORMERS:
        raise UserError("GGUF files of this model are checked by llama.cpp; pip install 'stoker[llamacpp]'")
    if export.format == "gguf":
        stops, chat = codec_of_run(tuned).stop_ids, task_of(tuned.job).rows.chat
        gguf_tokenizer(served_tokenizer(tuned), vocab_size=model.config.vocab_size, stops=stops, chat=chat)
    if export.quantise:
        check_quantisable(tuned, export.quantise)
    check_image_text(tuned, export.format, quantise=export.quantise)


def write_export(tuned: TunedRun, export: Export, base: Path, verify: Callable[[Path], None]) -> Path:
    """Writes an export that `check_export` accepts beside its target, verifies it, and renames it.

    Args:
        verify: raises where the written files do not give the run's answers.

    Returns:
        The folder, or the GGUF file in it.

    Raises:
        RunFailed: the disk is full, or ``verify`` found a difference; the files are then in ``TO.differs``.
    """
    partial = export.to.with_name(f".{export.to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        try:
            partial.mkdir(parents=True)
            write = (_SCORE_WRITERS if task_of(tuned.job).model.head == "score" else _WRITERS)[export.format]
            written = write(tuned, export, base, partial)
            write_card(tuned, export.format, base, partial)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            if re.fullmatch(r"\d+ requested and \d+ written", str(error)):  # elements, by numpy
                reason = "the disk took only a part of it"
            raise RunFailed(f"the export could not be written to {export.to}: {reason}") from error
        for file in filter(Path.is_file, partial.rglob("*")):  # safetensors 0.8 lets only their owner read its files
            file.chmod(partial.stat().st_mode & 0o666)
        try:
            verify(written)
        except RunFailed as error:
            differs = export.to.with_name(f"{export.to.name}.differs")
            shutil.rmtree(differs, ignore_errors=True)
            partial.rename(differs)
            raise RunFailed(f"{error}; the written files are in {differs}") from error
        if export.to.exists():
            export.to.rmdir()  # empty, as checked
        partial.rename(export.to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return export.to / written.relative_to(partial)


def _adapter(tuned: TunedRun, export: Export, base: Path, folder: Path) -> Path:
    name = public_name(tuned.job, base)
    save_adapter(tuned.model, folder, name.name)
    if name.catalogue:
        (folder / BASE_FILE).write_text(json.dumps({"base": name.catalogue}) + "\n")
    tokenizer = served_tokenizer(tuned)
    _keep_known_rows(tuned, base, folder, len(tokenizer))
    name_in_image_text(tuned, base, folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=_stops(tuned)).save_pretrained(folder)
    return folder


def _keep_known_rows(tuned: TunedRun, base: Path, folder: Path, tokens: int) -> None:
    """Truncates trained embeddings in an adapter to the rows of tokens, as peft resizes the base to one for each."""
    if extension_of(tuned.job, base) is not None and rows_of(base_of(tuned, base), tuned.job) < tokens:
        keep_rows(unwrap(tuned.model), folder, tokens)


def rows_of(base_name: str, job: ResolvedJob) -> int:
    """Returns the rows of the embedding of a model that transformers loads."""
    assert job.model is not None
    config = AutoConfig.from_pretrained(base_name, trust_remote_code=job.model.trust_remote_code)
    rows: int = config.get_text_config().vocab_size
    return rows


def _stops(tuned: TunedRun) -> int | list[int]:
    """Returns the stop tokens in the form of transformers' configurations, the end token first."""
    end = tuned.tokenizer.eos_token_id
    stops = sorted(codec_of_run(tuned).stop_ids, key=lambda stop: (stop != end, stop))
    return stops[0] if len(stops) == 1 else stops


def base_of(tuned: TunedRun, base: Path) -> str:
    """Returns the base of an adapter for transformers on this machine: the hub id, or a folder."""
    block = tuned.job.model
    assert block is not None
    source = find_model(block.name, base)
    assert source is not None
    return weights_of(source, block)


def _merged(tuned: TunedRun, export: Export, base: Path, folder: Path) -> Path:
    model = merged_model(tuned.model)
    model.generation_config.eos_token_id = _stops(tuned)
    model.generation_config.do_sample = model.generation_config.do_sample or None
    model.config.eos_token_id = model.generation_config.eos_token_id
    copy_processor(tuned, base, folder)
    with nullcontext() if export.quantise else held_as(model, DTYPES[export.weights]):
        model.save_pretrained(folder)
    served_tokenizer(tuned).save_pretrained(folder)
    return folder


def _classifier(tuned: TunedRun, export: Export, base: Path, folder: Path) -> Path:
    pad_id = padding_of(tuned)
    model = as_classifier(merged_model(tuned.model), pad_id=pad_id)
    with held_as(model, DTYPES[export.weights]):
        model.save_pretrained(folder)
    _save_padding_tokenizer(tuned, folder, pad_id)
    return folder


def _score_adapter(tuned: TunedRun, export: Export, base: Path, folder: Path) -> Path:
    pad_id = padding_of(tuned)
    save_score_adapter(tuned.model, folder, public_name(tuned.job, base).name, pad_id=pad_id)
    _keep_known_rows(tuned, base, folder, len(tuned.tokenizer))
    _save_padding_tokenizer(tuned, folder, pad_id)
    return folder


def _save_padding_tokenizer(tuned: TunedRun, folder: Path, pad_id: int) -> None:
    """Saves the tokenizer with the token by which rows of a batch are padded."""
    tokenizer = served_tokenizer(tuned)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    tokenizer.save_pretrained(folder)


@contextmanager
def held_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Casts the weights of a model within the block."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and t.dtype != dtype]
    before = [t.data for t in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def check_quantisable(tuned: TunedRun, quantise: str) -> None:
    """Raises UserError if the package is not installed, or the run's base is quantised already."""
    assert tuned.job.model is not None
    if tuned.job.model.quantise != "none":
        raise UserError(
            f"--quantise {quantise}: this run's base is in {tuned.job.model.quantise} already, and merging into it "
            "would round the tuning away"
        )
    quantisation(quantise, torch.float32)


def quantised_run(tuned: TunedRun, quantise: str) -> TunedRun:
    """Returns the run with its adapters merged and its linear layers quantised; consumes the run's own model.

    Raises:
        UserError: see `check_quantisable`.
    """
    check_quantisable(tuned, quantise)
    return replace(tuned, model=quantised_copy(merged_model(tuned.model), quantise, torch.float32).eval())


def merged_model(model: nn.Module):  # type: ignore[no-untyped-def]
    """Returns the model in transformers' form, with its adapters merged in float32, so that the sum is rounded once."""
    merged: Any = model
    if isinstance(model, PeftModel):
        model.float()
        _untie_adapted_ends(unwrap(model))
        merged = model.merge_and_unload()
    saved_form(merged)
    return merged


def _untie_adapted_ends(base: PreTrainedModel) -> None:
    """Gives the head its own weights if it shares those of the embedding and an adapter changes one of the two."""
    model: Any = base
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    plain: list[Any] = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if ends[1] is None or plain[0].weight is not plain[1].weight:
        return
    if any(isinstance(end, BaseTunerLayer) for end in ends):
        plain[1].weight = nn.Parameter(plain[1].weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def gguf_name(model: str, run: str) -> str:
    """Returns the name of the GGUF model of a run."""
    return f"{Path(model).name.removesuffix('.gguf')}-{run}"


def _gguf(tuned: TunedRun, export: Export, base: Path, folder: Path) -> Path:
    assert tuned.job.model is not None
    name = gguf_name(tuned.job.model.name, tuned.folder.path.name)
    target = folder / f"{name}.gguf"
    write_gguf(
        merged_model(tuned.model),
        served_tokenizer(tuned),
        target,
        dtype=GGUF_DTYPES[export.weights],
        name=name,
        stops=codec_of_run(tuned).stop_ids,
        chat=task_of(tuned.job).rows.chat,
    )
    return target


def codec_of_run(tuned: TunedRun) -> TextCodec:
    """Returns the codec with the template that the run was trained with."""
    return tuned.text.codec.for_source(tuned.job.data[0], tuned.base)


def served_tokenizer(tuned: TunedRun) -> PreTrainedTokenizerFast:
    """Returns the tokenizer with the chat template of the training."""
    tokenizer = tuned.tokenizer
    if task_of(tuned.job).rows.chat:
        tokenizer.chat_template = codec_of_run(tuned).template.source
    return tokenizer


_WRITERS: dict[Format, Callable[[TunedRun, Export, Path, Path], Path]] = {
    "adapter": _adapter,
    "merged": _merged,
    "gguf": _gguf,
}
_SCORE_WRITERS: dict[Format, Callable[[TunedRun, Export, Path, Path], Path]] = {
    "adapter": _score_adapter,
    "merged": _classifier,
}
