"""Tiny models of all families in GGUF files: read back, and through llama.cpp against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families import tiny
from stoker.checkpoint.export.gguf_families import FAMILIES, gguf_problem
from stoker.checkpoint.export.gguf_replay import ask_llamacpp
from stoker.checkpoint.export.gguf_writer import write_gguf
from stoker.checkpoint.export.replay import ReplayRequest, ReplayRow
from stoker.checkpoint.export.weights_check import stored_in_gguf, take_stored
from stoker.errors import RunFailed, UserError
from stoker.models.gguf_model import weights_of_gguf
from tiny_llama import save_tokenizer

VOCABULARY = 405  # more than the tokenizer's
GELU = ("gemma", "gemma2", "gemma3_text", "gpt2", "starcoder2", "gpt_neox", "bloom")  # from a table in float16
GEMMA3 = ["sliding_attention"] * 5 + ["full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": GEMMA3},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "starcoder2": {},
    "gpt_neox": {},
    "bloom": {},
}


def model_of(family: str, **changes: Any) -> Any:
    """A tiny model whose norms and biases are felt too."""
    model = tiny(family, dtype=torch.float32, vocab_size=VOCABULARY, pad_token_id=0, **CASES[family], **changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("family", CASES)
def test_llamacpp_computes_as_transformers(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    model, fast = model_of(family), save_tokenizer(tmp_path, tokenizer)
    assert gguf_problem(model.config.to_dict() | {"architectures": [type(model).__name__]}) is None
    file = tmp_path / "model.gguf"
    write_gguf(model, fast, file, dtype="f32", name=family, stops=(2,))
    take_stored(model, stored_in_gguf(model, file))
    ids = tuple(torch.randint(5, 390, (20,), generator=torch.Generator().manual_seed(1)).tolist())
    row = ReplayRow(ids, 12, tuple(range(19)))
    answers = ask_llamacpp(file, ReplayRequest((row,), (), ()))
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    apart = (torch.tensor(answers.scores[0]) - wanted).abs().max() / logits.std()
    assert apart < (2e-3 if model.config.model_type in GELU else 1e-5)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", "gpt_neox"])
def test_quantised_weights_are_read_back(family: str, dtype: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A stored matrix may be transposed or a part of one; its scales are those of its own rows."""
    model, file = model_of(family, hidden_size=64), tmp_path / "model.gguf"
    write_gguf(model, save_tokenizer(tmp_path, tokenizer), file, dtype=dtype, name=family, stops=(2,))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert kinds["blk.1.attn_output.weight"] == dtype.upper() and kinds["token_embd.weight"] == "Q8_0"
    assert kinds.get("blk.1.ffn_gate_inp.weight", "F32") == kinds.get("position_embd.weight", "F32") == "F32"
    take_stored(model, stored_in_gguf(model, file))
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "1.mlp" in name and weight.dim() > 1).mul_(1.3)
    with pytest.raises(RunFailed, match=r"1\.mlp"):
        take_stored(model, stored_in_gguf(model, file))


def test_a_file_that_transformers_reads_in_part_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(model_of("mixtral"), save_tokenizer(tmp_path, tokenizer), file, dtype="f32", name="mixtral", stops=(2,))
    with pytest.raises(UserError, match=r"transformers does not read .*; serve it with --engine llama\.cpp"):
        weights_of_gguf(file)


def test_every_family_has_a_case() -> None:
    """The others are in `test_gguf`."""
    classes = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in CASES}
    assert classes | {f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")} == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16, and llama.cpp uses 8"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "are not each 2th"),
        ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob is True, and llama.cpp takes False"),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "without rotation are not each 4th"),
        ("gpt2", {"activation_function": "relu"}, "the activation is relu"),
    ],
)
def test_refuses_what_llamacpp_computes_otherwise(family: str, changes: dict[str, Any], reason: str) -> None:
    config = tiny(family, dtype=torch.float32).config.to_dict() | changes
    problem = gguf_problem(config | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]})
    assert problem is not None and re.search(reason, problem)
