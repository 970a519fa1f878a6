"""Shapes found by a name or a file, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from stoker.errors import UserError
from stoker.plan.shapes import shape_named, shape_of_config, shape_of_model
from stoker.plan.shapes.gguf_shape import shape_of_gguf
from stoker.plan.shapes.known_models import CATALOGUE

SAME = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3-8b", "Meta-Llama-3-70B": "llama3-70b", "LLAMA3.1_405B": "llama3.1-405b",
    "Llama-2-7b-chat-hf": "llama2-7b", "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b", "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "DeepSeekV3": "deepseek-v3", "EleutherAI/pythia-1.4b-deduped": "pythia-1.4b", "Pythia-14b": None, "gpt": None,
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m", "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "google/gemma-2-9b-it": "gemma2-9b",
    "Phi-3-mini-4k-instruct": "phi3-mini", "Nemotron_3_5_Lightning": "nemotron3-nano",
}  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), SAME.items())
def test_names(name: str, meant: str | None) -> None:
    if meant is None:
        with pytest.raises(UserError, match="no well-known shape"):
            shape_named(name)
    else:
        assert shape_named(name) == shape_named(meant)


def test_no_two_shapes_share_a_name() -> None:
    assert all(shape_named(name).name == name for name in CATALOGUE)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "no `model_type`"),
    ({"model_type": "lama"}, "unknown family of models `lama`; write `llama`"),
    ({"model_type": "llama", "hidden_size": "wide"}, "`hidden_size` .* is 'wide'; write a whole number"),
    ({"model_type": "llama", "num_hidden_layers": 0}, "write a whole number of at least 1"),
    ({"model_type": "deepseek_v2"}, "no `num_experts_per_tok`"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "unknown layer 'X'"),
    ({"model_type": "qwen3_next", "layer_types": ["linear"]}, "unknown layer 'linear'"),
    ({"model_type": "qwen3_5_text", "full_attention_interval": 0}, "write a whole number of at least 1"),
    ({"model_type": "gemma2", "layer_types": 3}, "write a list of words"),
    ({"model_type": "qwen2_moe", "mlp_only_layers": 3}, "`mlp_only_layers` .* is 3; write a list of whole numbers"),
    ({"model_type": "qwen2_moe", "mlp_only_layers": ["1"]}, "write a list of whole numbers"),
    ({"model_type": "stablelm", "hidden_size": "wide"}, "cannot build a model of family `stablelm`: .*'hidden_size'"),
    ({"model_type": "stablelm", "num_attention_heads": 0}, "cannot build a model of family `stablelm`"),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_bad_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of_config(config)


def test_no_kinds_of_attention_are_full_attention() -> None:
    assert not shape_of_config({"model_type": "gpt_neo", "attention_types": []}).pattern


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"hidden_size": 640}}')
    assert shape_of_model(str(tmp_path)).width == 640
    (tmp_path / "config.json").write_text('{"model_type": \n 3,,}')
    with pytest.raises(UserError, match=r"config.json:2:4: the configuration is not valid JSON"):
        shape_of_model(str(tmp_path))
    with pytest.raises(UserError, match="cannot read"):
        shape_of_model(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="write `llama3-8b`"):
        shape_of_model("llama3-8c")


def test_shapes_need_no_torch() -> None:
    code = "import stoker.plan.shapes, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "9" * 5_000 + "}"])
def test_a_configuration_that_python_cannot_read_is_an_error_for_people(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="the configuration cannot be read"):
        shape_of_model(str(tmp_path))


def test_a_gguf_file_without_an_embedding_has_no_shape(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "headless.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"headless.gguf.*has no tensor token_embd.weight"):
        shape_of_gguf(tmp_path / "headless.gguf")
