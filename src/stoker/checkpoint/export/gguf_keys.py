"""The keys by which a GGUF describes a model's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.checkpoint.export.gguf_layout import GgufFamily, head_size

if TYPE_CHECKING:
    from gguf import GGUFWriter

_EPSILONS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")


def write_shape(writer: GGUFWriter, config: Any, family: GgufFamily) -> None:
    """Writes the keys of all families, and those of one."""
    window = None if family.windows else getattr(config, "sliding_window", None)
    context: int = getattr(config, "max_position_embeddings", 2048)  # BLOOM has no limit, and was trained with this
    heads = config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(min(context, window or context))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_feed_forward(config))
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(next(getattr(config, key) for key in _EPSILONS if hasattr(config, key)))
    if family.ropes:
        _write_rope(writer, config)
    for write in family.keys:
        write(writer, config)


def rope_of(settings: Any) -> Any:
    """Returns the rope of full attention, of settings for each kind of attention."""
    return settings.get("full_attention") or settings


def _write_rope(writer: GGUFWriter, config: Any) -> None:
    from gguf import RopeScalingType

    rope = rope_of(config.rope_parameters)
    writer.add_rope_dimension_count(int(head_size(config) * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _feed_forward(config: Any) -> int:
    width: int | None = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return width or 4 * config.hidden_size


def experts(writer: GGUFWriter, config: Any) -> None:
    """Numbers of experts, and their width."""
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def shared_expert(writer: GGUFWriter, config: Any) -> None:
    """The width of the shared expert."""
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def sliding_window(writer: GGUFWriter, config: Any) -> None:
    """The width of the window of some blocks."""
    writer.add_sliding_window(config.sliding_window)


def no_window(writer: GGUFWriter, config: Any) -> None:
    """No window: within the context length it makes no difference."""
    writer.add_sliding_window(0)


def soft_caps(writer: GGUFWriter, config: Any) -> None:
    """The bounds of attention scores and of logits."""
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def window_rope(writer: GGUFWriter, config: Any) -> None:
    """The frequency base of blocks with a window."""
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def granite_scales(writer: GGUFWriter, config: Any) -> None:
    """Factors of embeddings, attention scores, residuals and logits."""
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def parallel_residual(writer: GGUFWriter, config: Any) -> None:
    """Whether attention and MLP have the same input."""
    writer.add_parallel_residual(config.use_parallel_residual)
