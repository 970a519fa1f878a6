"""LoRA weights of a run or an exported folder, loaded beside other adapters over one base.

A folder is data only: its configuration contributes just numbers and flags, and its weights are safetensors. The
adapted layers and their ranks are read from the weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stoker.checkpoint.export.adapter_export import PREFIX, WEIGHTS
from stoker.checkpoint.load_run import state_at
from stoker.errors import Problem, UserError, user_file_errors
from stoker.files import irregular
from stoker.generate.open_model import OpenModel
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.load_job import LoadedJob
from stoker.models.offline_models import BASE_FILE
from stoker.models.tuning.adapters import unwrap
from stoker.runs.run_folder import RunFolder
from stoker.serve.served_models.adapter_config import CONFIG, check_lora, read_object

# The beginning of names in an image-text model, whose language model is the base here.
IN_IMAGE_TEXT = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?=(lm_head\.)?)")
LORA_MATRIX = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight")


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter.

    Attributes:
        tensors: LoRA matrices by name, as in peft's files.
        alpha: numerator of the scaling.
        alphas: numerators that differ, by the end of a layer's name.
        base: the base model that its folder names.
        of_run: whether its layers are named as in training, where fused layers are split.
    """

    origin: str
    tensors: Mapping[str, Tensor]
    alpha: float
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    base: str = ""
    of_run: bool = False

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each adapted layer."""
        end = ".lora_A.weight"
        return {
            name[len(PREFIX) : -len(end)]: int(tensor.shape[0]) if tensor.dim() else 0
            for name, tensor in self.tensors.items()
            if name.startswith(PREFIX) and name.endswith(end)
        }


def weights_of_folder(path: Path) -> AdapterWeights:
    """Reads an exported folder.

    Raises:
        UserError: it holds no LoRA adapter in safetensors, or one of a kind that cannot share a base.
    """
    for file in (path / CONFIG, path / WEIGHTS, path / BASE_FILE):
        if kind := irregular(file):
            raise UserError(f"{file} cannot be read: it is {kind}, not a file")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is not an adapter: it has no {CONFIG}")
    if not (path / WEIGHTS).is_file():
        raise UserError(Problem(f"{path} holds no {WEIGHTS}", "convert pickled weights to safetensors"))
    config = read_object(path / CONFIG)
    check_lora(path, config)
    own = read_object(path / BASE_FILE) if (path / BASE_FILE).is_file() else {}
    base = own.get("base") or config.get("base_model_name_or_path") or ""
    with user_file_errors(str(path / WEIGHTS)):
        tensors = load_file(path / WEIGHTS)
    return AdapterWeights(
        str(path),
        tensors,
        alpha=float(config["lora_alpha"]),
        alphas=config.get("alpha_pattern") or {},
        rslora=config.get("use_rslora") is True,
        base=str(base),
    )


def is_plain_lora(tune: TuneBlock) -> bool:
    """Returns whether a run trains LoRA matrices only, so that other adapters can share its base."""
    return tune.method in ("lora", "qlora") and not tune.dora and not tune.modules_to_save


def weights_of_run(folder: RunFolder, loaded: LoadedJob, at: str, base: Path) -> AdapterWeights | None:
    """Reads the adapter from a run's checkpoint; None if it trained anything but plain LoRA."""
    tune = loaded.job.tune
    if not is_plain_lora(tune):
        return None
    state = state_at(folder, loaded.job, at, base)
    named = {key.removeprefix("model/"): t for key, t in state.tensors.items() if key.startswith("model/")}
    if not named or not all(re.search(r"\.lora_[AB]\.default\.weight$", key) for key in named):
        return None
    tensors = {key.replace(".default.weight", ".weight"): t for key, t in named.items() if isinstance(t, Tensor)}
    assert len(tensors) == len(named), "the checkpoint was read whole"
    return AdapterWeights(str(folder.path), tensors, float(tune.alpha), rslora=tune.rslora, of_run=True)


def insert_adapter(opened: OpenModel, name: str, weights: AdapterWeights) -> OpenModel:
    """Returns the open model with a further adapter. Must be called in the engine's thread.

    Raises:
        UserError: the weights do not fit the base.
    """
    base, model = unwrap(opened.decoder.model), opened.decoder.model
    if not any(IN_IMAGE_TEXT.match(name) for name, _ in base.named_modules()):
        weights = _without_image_text(weights)
    ranks = weights.ranks
    _check_names(weights)
    _check_shapes(base, weights)
    usual = Counter(ranks.values()).most_common(1)[0][0]
    config = LoraConfig(
        r=usual,
        lora_alpha=weights.alpha,  # type: ignore[arg-type]  # peft takes fractions as well
        target_modules=list(ranks),
        rank_pattern={layer: rank for layer, rank in ranks.items() if rank != usual},
        alpha_pattern=_matching(weights.alphas, ranks),
        use_rslora=weights.rslora,
        bias="none",
        init_lora_weights=False,
        inference_mode=True,
        task_type="CAUSAL_LM",
    )
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(base, config, adapter_name=name)
    found: Any = set_peft_model_state_dict(model, dict(weights.tensors), adapter_name=name)
    assert not found.unexpected_keys, found.unexpected_keys[:3]
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.requires_grad_(False)
    return replace(opened, decoder=replace(opened.decoder, model=model.eval()))


def _without_image_text(weights: AdapterWeights) -> AdapterWeights:
    """Returns an adapter of an image-text model with the names that its language model has alone."""

    def plain(name: str) -> str:
        return IN_IMAGE_TEXT.sub(lambda found: "" if found[1] else "model.", name, count=1)

    tensors = {
        PREFIX + plain(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name: tensor
        for name, tensor in weights.tensors.items()
    }
    return replace(weights, tensors=tensors, alphas={plain(name): alpha for name, alpha in weights.alphas.items()})


def _matching(alphas: Mapping[str, float], layers: Iterable[str]) -> dict[str, float]:
    """Returns the numerators whose pattern is of a layer: peft warns of others, which have no effect."""
    return {key: alpha for key, alpha in alphas.items() if any(re.match(rf"(.*\.)?({key})$", name) for name in layers)}


def _check_names(weights: AdapterWeights) -> None:
    """Rejects weights that are not exactly two matrices for each of some layers."""
    names = set(weights.tensors)
    adapted = {found[1] for name in names if (found := LORA_MATRIX.fullmatch(name))}
    expected = {f"{PREFIX}{layer}.lora_{matrix}.weight" for layer in adapted for matrix in "AB"}
    if not names or names != expected:
        odd = [f"it has {name}" for name in sorted(names - expected)]
        odd += [f"it lacks {name}" for name in sorted(expected - names)]
        raise UserError(f"{weights.origin} is not a plain LoRA adapter: {odd[0] if odd else 'it has no weights'}")


def _check_shapes(base: nn.Module, weights: AdapterWeights) -> None:
    """Rejects matrices that do not fit linear layers of the base, or are not finite."""
    ranks = weights.ranks
    if 0 in ranks.values():
        raise UserError(f"{weights.origin} does not fit the base: it has matrices of rank 0")
    layers = dict(base.named_modules())
    for name, rank in ranks.items():
        layer: Any = layers.get(name)
        layer = getattr(layer, "base_layer", layer)
        if not isinstance(layer, nn.Linear | Conv1D) or layer is base.get_output_embeddings():  # type: ignore[operator]
            raise UserError(f"{weights.origin} does not fit the base: it has no layer {name} that can be adapted")
        if isinstance(layer, Conv1D):
            inputs, outputs = layer.weight.shape
        else:
            inputs, outputs = layer.in_features, layer.out_features
        shapes = {"A": (rank, inputs), "B": (outputs, rank)}
        for matrix, shape in shapes.items():
            held = weights.tensors[f"{PREFIX}{name}.lora_{matrix}.weight"]
            if tuple(held.shape) != shape or not held.is_floating_point():
                given = tuple(held.shape)
                raise UserError(f"{weights.origin} does not fit the base: {name} has {given} where {shape} is needed")
            if not bool(torch.isfinite(held).all()):
                raise UserError(f"{weights.origin}: the weights of {name} are not finite")
