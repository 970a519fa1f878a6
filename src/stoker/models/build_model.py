"""Builds the job's model for training, with its weights and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from stoker.errors import Problem, UserError
from stoker.hardware.process_device import Device
from stoker.job.keys.tune_keys import ADAPTERS
from stoker.job.resolved import ResolvedJob
from stoker.job.task_spec import SHARED_CRITIC, task_of
from stoker.models.critic import add_critic
from stoker.models.dropout import without_dropout
from stoker.models.load_model import Blank, blank_model
from stoker.models.meta_model import allocate
from stoker.models.prepare_architecture import training_form
from stoker.models.resize_embeddings import NewRows, add_embedding_rows, why_rows_untrained
from stoker.models.score_head import add_score_head, first_scores
from stoker.models.tokenizers.job_tokenizer import extension_of
from stoker.models.tuning.adapters import add_adapter
from stoker.models.tuning.lora import fuse_lora
from stoker.models.tuning.quantise import cut_by
from stoker.models.tuning.virtual_tokens import Drawn, FirstValues, Prefix, VirtualPrompt, add_virtual_tokens
from stoker.models.weight_source import Assembled, fill_whole


@dataclass(frozen=True)
class Built:
    """A model in training mode, and the source of its weights.

    Attributes:
        model: with its parameters on the meta device and real buffers. Only a quantised base has its weights already.
        weights: by the current names of the model's parameters.
        new_rows: of tokens that the model did not have; None if it had all.
        left_out: number of parameters of an image-text model outside of its language model, which are not loaded.
    """

    model: nn.Module
    weights: Assembled
    new_rows: NewRows | None = None
    left_out: int = 0


def build_meta(
    job: ResolvedJob,
    base: Path,
    device: Device,
    *,
    stop_id: int | None = None,
    text: Sequence[int] | None = None,
    first: Drawn | None = None,
) -> Built:
    """Returns the job's model without memory: fused layers split, adapters inserted.

    Args:
        base: the folder that relative paths start from.
        stop_id: the end token in the configuration of a model from scratch.
        text: token ids of ``tune.text``.
        first: first values of parameters that the task or tuning adds, in the place of drawn ones.

    Raises:
        UserError: the model cannot be found or loaded, a target of the adapters names no layer, or the rows of new
            tokens would not be trained.
    """
    assert job.model is not None
    task = task_of(job)
    # Trained weights are float32 (float64 if asked for); a frozen base is stored in the dtype of its products.
    trained = torch.float64 if device.precision == "fp64" else torch.float32
    frozen = job.tune.method != "full"
    dtype = (device.autocast_dtype if frozen else None) or trained
    storage = dtype if cut_by(job) else torch.uint8
    blank = blank_model(job.model, base, seed=job.seed, dtype=dtype, stop_id=stop_id, storage=storage, tune=job.tune)
    if blank.scores is not None and task.model.head != "score":
        message = f"{job.model.name} has the weights of a classifier, which scores texts and writes none"
        raise UserError(Problem(message, "name a language model, or write `task: reward`", key="model.name"))
    blank, new_rows = _with_new_rows(blank, job, base)
    if not task.model.dropout:
        without_dropout(blank.model)
    model: nn.Module = blank.model
    quantised = not any(p.is_meta for p in model.parameters())
    parts = training_form(blank.model)
    drawn: Drawn = {}
    score = add_score_head(blank.model, dtype=trained) if task.model.head == "score" else None
    if job.tune.method in ADAPTERS:
        model = add_adapter(blank.model, job.tune)
    elif frozen:
        drawn = add_virtual_tokens(blank.model, job.tune, _reader(blank, text), seed=job.seed)
    if task.model.critic(job) == SHARED_CRITIC:
        drawn |= add_critic(model, job.seed)
    if score is not None:
        score.weight.requires_grad_(True)
        drawn |= first_scores(model, score, job.seed, blank.scores)
    fuse_lora(model)
    drawn |= first or {}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights = Assembled(blank.weights, shapes, job.seed, parts, _transposed(model), drawn)
    if quantised:
        fill_whole(_new_parameters(model, device), weights)
    return Built(model.train(), weights, new_rows, blank.left_out)


def _with_new_rows(blank: Blank, job: ResolvedJob, base: Path) -> tuple[Blank, NewRows | None]:
    """Adds rows for the tokens that the job's tokenizer adds to the model's, if any."""
    extension = extension_of(job, base)
    if extension is None:
        return blank, None
    blank, new_rows = add_embedding_rows(blank, extension)
    why = why_rows_untrained(blank.model, new_rows, job.tune)
    if why is not None:
        raise UserError(Problem(why, "write `tune: full`, or `tune: lora` and name them in tune.modules_to_save"))
    return blank, new_rows


def _transposed(model: nn.Module) -> frozenset[str]:
    """Returns the names of adapted matrices that are stored as (inputs, outputs)."""
    return frozenset(
        f"{name}.base_layer.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
        and (getattr(layer, "fan_in_fan_out", False) or isinstance(layer.get_base_layer(), nn.Embedding))
    )


def _reader(blank: Blank, text: Sequence[int] | None) -> FirstValues:
    """Reads rows of the model's embedding as its blocks get them, in memory or from its files."""
    layer = blank.model.get_input_embeddings()
    embedding, scale = layer.weight, getattr(layer, "scalar_embed_scale", 1.0)  # Gemma's scales its rows
    assert isinstance(embedding, Tensor)
    name = next(name for name, p in blank.model.named_parameters(remove_duplicate=False) if p is embedding)

    def embeddings(ids: Sequence[int]) -> Tensor:
        if not embedding.is_meta:
            return embedding.detach()[list(ids)].cpu() * scale
        width = slice(0, embedding.shape[1])
        return torch.cat([blank.weights.read(name, (slice(i, i + 1), width)) for i in ids]) * scale

    return FirstValues(embeddings, text)


def _new_parameters(model: nn.Module, device: Device) -> dict[str, nn.Parameter]:
    """Returns the parameters that tuning added to a base that has its weights, with memory on the device."""
    for module in model.modules():
        if isinstance(module, VirtualPrompt | Prefix):
            module.encoder.to_empty(device=device.torch)
    lora = {n: p for n, p in model.named_parameters() if ".lora_" in n and ".lora_magnitude_vector." not in n}
    return lora or {n: p for n, p in model.named_parameters() if p.requires_grad}


def build_model(job: ResolvedJob, base: Path, device: Device, *, stop_id: int | None = None) -> nn.Module:
    """Returns the job's whole model on its device. See `build_meta`."""
    built = build_meta(job, base, device, stop_id=stop_id)
    fill_whole(allocate(built.model, device.torch), built.weights)
    return built.model
