"""Virtual tokens: trained positions before every sequence, with all weights frozen.

A prompt is embeddings before the first layer (prompt tuning: Lester et al., 2021; P-tuning, where an encoder makes
them: Liu et al., 2021). A prefix is keys and values before those of every layer (prefix tuning: Li and Liang, 2021;
without an encoder, P-tuning v2: Liu et al., 2022). The encoders and the file format are peft's.

In training a prompt's tokens are ids above the vocabulary, so rows with them are packed like any others.

Shapes: B rows, T tokens, K virtual tokens, D embedding width, L layers, H heads of keys, Q width of a head, V rows of
the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptLearningConfig, PromptTuningConfig, TaskType
from peft.tuners.p_tuning import PromptEncoder
from peft.tuners.prefix_tuning import PrefixEncoder
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from stoker.errors import UserError
from stoker.job.blocks.tune_block import TuneBlock
from stoker.models.cache_argument import NAMES, cache_argument, state_layers
from stoker.models.init_weights import drawn_for
from stoker.models.meta_model import META

Drawn = dict[str, Callable[[], Tensor]]
"""Initial values of parameters, by name."""
SPREAD = 0.02  # standard deviation of a deep prefix' initial keys and values: small compared with the model's own


class VirtualPrompt(nn.Module):
    """Replaces a model's input embedding, its ``base_layer``, by one with K virtual tokens after its own V."""

    def __init__(self, base_layer: nn.Module, encoder: nn.Module, config: PromptLearningConfig) -> None:
        super().__init__()
        self.base_layer, self.encoder, self.config = base_layer, encoder, config
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        """The model's own embedding, shape (V, D)."""
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def first(self) -> int:
        """The id of the first virtual token."""
        return int(self.base_layer.num_embeddings)  # type: ignore[arg-type]

    @property
    def ids(self) -> list[int]:
        """The ids of the virtual tokens."""
        return list(range(self.first, self.first + self.config.num_virtual_tokens))

    def embeddings(self) -> Tensor:
        """Returns the embeddings of the virtual tokens, shape (K, D)."""
        if isinstance(self.encoder, nn.Embedding):
            return self.encoder.weight
        return _made_by(self.encoder, self.config)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Returns the embeddings of ids, shape (B, T, D)."""
        first = self.first
        own_BTD = self.base_layer(ids_BT.clamp(max=first - 1))
        if not self.enabled:
            return own_BTD
        virtual_KD = self.embeddings().to(own_BTD.dtype)
        return torch.where((ids_BT >= first)[..., None], virtual_KD[(ids_BT - first).clamp(min=0)], own_BTD)


class Prefix(nn.Module):
    """Keys and values in the cache of every layer of a model."""

    def __init__(self, encoder: PrefixEncoder, config: PrefixTuningConfig) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config
        self.enabled = True

    def embeddings(self) -> Tensor:
        """Returns the keys and values of all layers, shape (K, L * 2 * H * Q)."""
        return _made_by(self.encoder, self.config)

    def keys_and_values(self, rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """(keys, values) of each layer, both of shape (B, H, K, Q)."""
        heads, layers = self.config.num_attention_heads, self.config.num_layers
        assert heads and layers
        flat = self.embeddings().to(dtype).view(self.config.num_virtual_tokens, layers, 2, heads, -1)
        whole = flat.permute(1, 2, 3, 0, 4)[:, :, None].expand(-1, -1, rows, -1, -1, -1)
        return [(layer[0], layer[1]) for layer in whole.unbind()]

    def before(self, body: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook of the model's body: fills its cache and shifts mask and positions by the prefix."""
        if not self.enabled:
            return arguments, options
        options = {**dict(zip(signature(body.forward).parameters, arguments, strict=False)), **options}
        given = options["input_ids"] if options.get("input_ids") is not None else options["inputs_embeds"]
        rows, given_caches = given.shape[0], [options.pop(name, None) for name in NAMES]
        cache = next((cache for cache in given_caches if cache is not None), None)
        if cache is None:
            cache = DynamicCache()
        if not cache.get_seq_length():
            for number, (keys, values) in enumerate(self.keys_and_values(rows, body.dtype)):
                cache.update(keys, values, number)
        count = self.config.num_virtual_tokens
        name = cache_argument(body)
        assert name is not None  # `add_virtual_tokens` refuses others
        counted: dict[str, Any] = {name: cache}
        mask, positions = options.get("attention_mask"), options.get("position_ids")
        if mask is not None:
            counted["attention_mask"] = torch.cat((mask.new_ones(rows, count), mask), dim=1)
        if positions is not None:
            counted["position_ids"] = positions + count
        return (), {**options, **counted}


def _made_by(encoder: nn.Module, config: PromptLearningConfig) -> Tensor:
    numbers = torch.arange(config.num_virtual_tokens, device=next(encoder.parameters()).device)
    return encoder(numbers[None])[0]


@dataclass(frozen=True)
class FirstValues:
    """The source of a prompt's first values.

    Attributes:
        embeddings: returns the model's own rows of token ids, shape (N, D).
        text: token ids of `TuneBlock.text`.
    """

    embeddings: Callable[[Sequence[int]], Tensor]
    text: Sequence[int] | None = None


def add_virtual_tokens(model: PreTrainedModel, tune: TuneBlock, reader: FirstValues, *, seed: int) -> Drawn:
    """Adds a job's virtual tokens to a model, in place; everything else is frozen.

    Returns:
        The initial values of the new parameters, which are on the meta device.

    Raises:
        UserError: the model takes no cache of keys and values, or has layers with states instead.
    """
    model.requires_grad_(False)
    config = _prompt_config(model, tune)
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    with drawn_for(seed, "virtual tokens"):  # whole and on the CPU: the same under every layout
        encoder = _encoder(config, tune)
    first: Drawn = {key: (lambda value=value: value) for key, value in encoder.state_dict().items()}  # type: ignore[misc]
    if tune.method == "prompt":
        first = {"weight": lambda: _first_embeddings(tune, reader, int(embedding.num_embeddings), seed=seed)}  # type: ignore[arg-type]
    encoder.to(META)
    if isinstance(config, PrefixTuningConfig):
        assert isinstance(encoder, PrefixEncoder)
        # The innermost model around the embedding: outer ones may be bypassed (OPT).
        inside = [m for path, m in model.named_modules() if isinstance(m, PreTrainedModel) and name.startswith(path)]
        body: Any = inside[-1]
        if cache_argument(body) is None or state_layers(model.config):
            raise UserError(f"tune.method: {type(model).__name__} takes no cache of keys and values for a prefix")
        prefix = Prefix(encoder, config)
        body.add_module("prefix", prefix)
        body.register_forward_pre_hook(prefix.before, with_kwargs=True)
        path = next(name for name, module in model.named_modules() if module is prefix)
    else:
        model.set_input_embeddings(VirtualPrompt(embedding, encoder, config))
        path = name
    return {f"{path}.encoder.{key}": value for key, value in first.items()}


def _prompt_config(model: PreTrainedModel, tune: TuneBlock) -> PromptLearningConfig:
    """peft's configuration of a ``tune:`` block, with every size set, so that peft infers none."""
    sizes: Any = model.config.get_text_config()
    layers, heads = sizes.num_hidden_layers, sizes.num_attention_heads
    shared: dict[str, Any] = {
        "task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": tune.tokens, "num_layers": layers,
        "num_transformer_submodules": 1,
    }  # fmt: skip
    if tune.method == "prefix" or tune.deep:
        if hasattr(sizes, "v_head_dim"):  # latent attention keeps what keys and values are made of
            raise UserError("tune.method: a prefix has keys and values of one size, and those of this model differ")
        if getattr(sizes, "is_heterogeneous", False) or getattr(sizes, "num_kv_shared_layers", None):
            raise UserError(
                "tune.method: a prefix has keys and values of one size in all layers, and those of this model differ"
            )
        keys = getattr(sizes, "num_key_value_heads", None) or heads
        if getattr(sizes, "multi_query", False) and not getattr(sizes, "new_decoder_architecture", False):  # Falcon
            keys = 1
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
        return PrefixTuningConfig(
            **shared,
            token_dim=keys * width,
            num_attention_heads=keys,
            prefix_projection=tune.projection and not tune.deep,
            encoder_hidden_size=keys * width if tune.width == "auto" else tune.width,
        )
    if getattr(sizes, "hidden_size_per_layer_input", None):
        raise UserError("tune.method: the blocks of this model embed every token, and virtual tokens have no such rows")
    embedding = model.get_input_embeddings()
    width = int(embedding.embedding_dim)  # type: ignore[arg-type]
    if tune.method == "prompt":
        return PromptTuningConfig(**shared, token_dim=width, num_attention_heads=heads)
    return PromptEncoderConfig(
        **shared,
        token_dim=width,
        num_attention_heads=heads,
        encoder_reparameterization_type=tune.encoder.upper(),
        encoder_hidden_size=width if tune.width == "auto" else tune.width,
    )


def _encoder(config: PromptLearningConfig, tune: TuneBlock) -> nn.Module:
    if isinstance(config, PrefixTuningConfig):
        encoder = PrefixEncoder(config)
        if not config.prefix_projection:
            nn.init.normal_(encoder.embedding.weight, std=SPREAD)
        return encoder
    if isinstance(config, PromptEncoderConfig):
        return PromptEncoder(config)
    return nn.Embedding(tune.tokens, config.token_dim)


def _first_embeddings(tune: TuneBlock, reader: FirstValues, vocabulary: int, *, seed: int) -> Tensor:
    """Returns the embeddings of a text, repeated, or of tokens drawn from the vocabulary, shape (K, D).

    Both learn faster than random numbers (Lester et al., 2021, section 3.2).
    """
    if reader.text is not None:
        ids = [reader.text[i % len(reader.text)] for i in range(tune.tokens)]
    else:
        with drawn_for(seed, "tokens of the prompt"):
            ids = torch.randint(vocabulary, (tune.tokens,)).tolist()
    return reader.embeddings(ids).float()


def virtual_of(model: nn.Module) -> VirtualPrompt | Prefix | None:
    """Returns a model's virtual tokens."""
    return next((module for module in model.modules() if isinstance(module, VirtualPrompt | Prefix)), None)


def has_prefix(model: nn.Module) -> bool:
    """Returns whether a model has a `Prefix`."""
    return isinstance(virtual_of(model), Prefix)


def virtual_ids(model: nn.Module) -> list[int]:
    """Returns the ids of the virtual tokens before every row; empty without an enabled prompt."""
    found = virtual_of(model)
    return found.ids if isinstance(found, VirtualPrompt) and found.enabled else []


@contextmanager
def virtual_tokens_off(tokens: VirtualPrompt | Prefix | None) -> Iterator[None]:
    """Disables virtual tokens within the block, if there are any."""
    if tokens is None or not tokens.enabled:
        yield
        return
    tokens.enabled = False
    try:
        yield
    finally:
        tokens.enabled = True
