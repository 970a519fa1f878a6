"""The language model of an image-text model, which is trained on text.

Checkpoints of image-text models contain a language model beside an image encoder. Stoker builds only the language
model, as transformers' causal one of its family (`stoker.models.hf_config.text_config`), so that everything holds that
is known of the family. Its weights are found by the image-text model's own loading rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from stoker.errors import user_file_errors
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.meta_model import allocate, name_groups, set_parameter
from stoker.models.model_from_config import bound_scores, model_from_config
from stoker.models.safetensors_reader import Stored
from stoker.models.weight_source import Rows, all_rows, fill_whole


@dataclass(frozen=True)
class ImageText:
    """An image-text model, and the places of its language model.

    Attributes:
        model: its parameters are on the meta device.
        paths: of the modules that the causal language model has at the top, by their names there.
    """

    model: PreTrainedModel
    paths: Mapping[str, str]

    @classmethod
    def around(cls, text: PreTrainedModel, config: PreTrainedConfig, block: ModelBlock, where: str) -> ImageText:
        """Builds the image-text model of a configuration.

        Args:
            text: its language model.
            where: folder or hub id of the generation settings.
        """
        model: Any = model_from_config(config, block, where, text.dtype, AutoModelForImageTextToText)
        names = {module: name for name, module in model.named_modules()}
        decoder, embedding = model.get_decoder(), text.get_input_embeddings()
        parts = {name: embedding in set(child.modules()) for name, child in text.named_children()}
        if all(hasattr(decoder, name) for name in parts):  # the causal model itself (Llama 4)
            return cls(model, {name: f"{names[decoder]}.{name}" for name in parts})
        head = names[model.get_output_embeddings()]
        return cls(model, {name: names[decoder] if embeds else head for name, embeds in parts.items()})

    def name(self, name: str) -> str:
        """Returns the name in this model of a module or tensor of the language model."""
        top, dot, below = name.partition(".")
        return f"{self.paths[top]}{dot}{below}"

    @property
    def left_out(self) -> int:
        """Number of parameters outside of the language model."""
        inside = tuple(f"{path}." for path in self.paths.values())
        return sum(p.numel() for name, p in self.model.named_parameters() if not name.startswith(inside))

    def with_weights(self, text: PreTrainedModel, stored: Stored) -> PreTrainedModel:
        """Returns this model with the parameters of a language model, which it shares, and others from its files."""
        for name, parameter in text.named_parameters(remove_duplicate=False):
            set_parameter(self.model, self.name(name), parameter)
        for name, buffer in _stored_buffers(text):
            self.model.get_buffer(self.name(name)).copy_(buffer)
        fill_whole(allocate(self.model, torch.device("cpu")), stored)
        for config in (self.model.config, self.model.config.get_text_config()):
            config.tie_word_embeddings = text.config.tie_word_embeddings
        return self.model


class TextWeights:
    """The weights of a language model in the files of an image-text model."""

    def __init__(self, stored: Stored, around: ImageText, text: PreTrainedModel) -> None:
        """Gives the language model its stored buffers, and unties weights that the files store separately."""
        self._stored, self._around = stored, around
        held = dict(around.model.named_parameters(remove_duplicate=False))
        for first, *others in name_groups(text):
            for name in others:
                if held[around.name(name)] is not held[around.name(first)]:
                    set_parameter(text, name, nn.Parameter(torch.empty_like(text.get_parameter(name))))
                    text.all_tied_weights_keys.pop(name, None)
                    text.config.tie_word_embeddings = False
        for name, buffer in _stored_buffers(text):
            buffer.copy_(around.model.get_buffer(around.name(name)))

    def read(self, name: str, rows: Rows) -> Tensor:
        """See `WeightSource`."""
        return self._stored.read(self._around.name(name), rows)

    def quantised(self, text: PreTrainedModel, settings: Any) -> PreTrainedModel:
        """Returns the language model with its linear layers quantised by transformers' settings."""
        state = {name: self.read(name, all_rows(tensor.shape)) for name, tensor in text.state_dict().items()}
        with user_file_errors(f"the language model of {self._around.model.config.name_or_path}"):
            held: PreTrainedModel = type(text).from_pretrained(
                None, config=text.config, state_dict=state, dtype=text.dtype, quantization_config=settings
            )
        held.generation_config = text.generation_config
        bound_scores(held)
        return held


def _stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that checkpoints contain, by name."""
    stored = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
