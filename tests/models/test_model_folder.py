"""Damaged model folders: refused by `check` from names and headers, and by loading, each with the file's name."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2CLS

from families import SHAPES, tiny
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.hf_config import generation_config
from stoker.models.load_model import blank_model
from stoker.models.model_folder import ACTIVATIONS
from stoker.models.model_source import model_problem

LONG = {"rope_type": "longrope", "factor": 4, "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files, with an index."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    tiny("llama", dtype=torch.float32).save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **values}))

    return change


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def with_header(**entry: Any) -> Callable[[Path], None]:
    """Changes what the first file's header says of its first tensor."""

    def change(folder: Path) -> None:
        data = first(folder).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        next(value for key, value in header.items() if key != "__metadata__").update(entry)
        text = json.dumps(header).encode()
        first(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return change


def pointed(name: Any) -> Callable[[Path], None]:
    """Changes where the index says that a weight is."""

    def change(folder: Path) -> None:
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        changed(INDEX, weight_map={**weights, "model.norm.weight": name})(folder)

    return change


DAMAGE = {
    "width as text": (changed("config.json", hidden_size="192"), "config.json", "`hidden_size` must be a whole number"),
    "no heads": (changed("config.json", num_attention_heads=0), "config.json", "must be a whole number above 0, not 0"),
    "too many layers": (changed("config.json", num_hidden_layers=10**9), "config.json", "models have at most 10,000"),
    "too many tokens": (changed("config.json", vocab_size=10**12), "config.json", "at most 100,000,000"),
    "an activation": (changed("config.json", hidden_act="evil"), "config.json", "`hidden_act` must be an activation"),
    "too many layers of MPT": (changed("config.json", n_layers=10**7), "config.json", "at most 10,000"),
    "too many layers of GPT-Neo": (changed("config.json", num_layers=10**8), "config.json", "at most 10,000"),
    "layers without weights": (
        changed("config.json", num_hidden_layers=30),
        "config.json",
        "`num_hidden_layers` is",
    ),
    "layers below 0": (changed("config.json", num_hidden_layers=-1), "config.json", "`num_hidden_layers` must be"),
    "more experts of a token than there are": (
        changed("config.json", num_local_experts=4, num_experts_per_tok=99),
        "config.json",
        "`num_experts_per_tok` must be 1 to 4, the number of experts, not 99",
    ),
    "a list of kinds": (changed("config.json", model_type=["llama"]), "config.json", "`model_type` must be text"),
    "deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json", "no model's configuration"),
    "index outside": (pointed("../secret.safetensors"), INDEX, "not in this folder"),
    "index absolute": (pointed("/etc/passwd"), INDEX, "not in this folder"),
    "index of numbers": (pointed(5), INDEX, "not in this folder"),
    "index of a file not there": (pointed("gone.safetensors"), INDEX, "gone.safetensors is missing"),
    "index without a map": (changed(INDEX, weight_map=[]), INDEX, "`weight_map`"),
    "truncated": (lambda f: first(f).write_bytes(first(f).read_bytes()[:-5]), "model-00001", "not fully covered"),
    "empty": (lambda f: first(f).write_bytes(b""), "model-00001", "header too small"),
    "shape": (with_header(shape=[10**12]), "model-00001", "invalid shape"),
    "offsets": (with_header(data_offsets=[5, 1]), "model-00001", "invalid"),
    "header": (with_header(data_offsets="x"), "model-00001", "invalid JSON in header"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_with_the_name_of_the_file(damage: str, folder: Path) -> None:
    apply, file, said = DAMAGE[damage]
    apply(folder)
    problem = model_problem(ModelBlock(name="model"), folder.parent)
    assert problem is not None and file in problem[0] and said in problem[0]
    with pytest.raises(UserError):
        load_model(ModelBlock(name="model"), folder.parent, seed=0)


def test_activations_are_those_of_transformers() -> None:
    assert set(ACT2CLS) <= ACTIVATIONS


def replaced(folder: Path, make: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Changes one weight and returns its file."""
    file = next(f for f in sorted(folder.glob("*.safetensors")) if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": make(tensors["model.norm.weight"])}, file, metadata={"format": "pt"})
    return file.name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_found_while_loading(value: float, folder: Path) -> None:
    file = replaced(folder, lambda weight: weight.index_fill(0, torch.tensor([3]), value))
    with pytest.raises(UserError, match=rf"model.norm.weight .*{file}.* is not finite"):
        load_model(ModelBlock(name="model"), folder.parent, seed=0)


def test_weights_of_whole_numbers_are_no_weights_as_they_are(folder: Path) -> None:
    file = replaced(folder, lambda weight: weight.to(torch.int8))
    problem = model_problem(ModelBlock(name="model"), folder.parent)
    assert problem is not None and file in problem[0] and "model.norm.weight contains integers (I8)" in problem[0]
    with pytest.raises(UserError, match=r"contains integers \(torch.int8\)"):
        load_model(ModelBlock(name="model"), folder.parent, seed=0)


def test_half_precision_and_buffers_are_left_alone(folder: Path) -> None:
    replaced(folder, lambda weight: weight.to(torch.bfloat16))
    assert model_problem(ModelBlock(name="model"), folder.parent) is None
    load_model(ModelBlock(name="model"), folder.parent, seed=0)


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    for name, content, said in (
        ("text.gguf", b"not at all", "is not a GGUF file"),
        ("cut.gguf", b"GGUF" + b"\x03\0\0\0" + b"\xff" * 40, None),
        ("array.gguf", struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"x", 9, 0, 100_000), None),
    ):
        (tmp_path / name).write_bytes(content)
        problem = model_problem(ModelBlock(name=name), tmp_path)
        assert (problem and said in problem[0]) if said else problem is None
        with pytest.raises(UserError, match=name):
            load_model(ModelBlock(name=name), tmp_path, seed=0)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "x"}', '{"stop_strings": 5}', '{"cache_implementation": "x"}']
)
def test_damaged_generation_settings_are_not_taken_for_none(content: str, folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert generation_config(str(folder)) is None
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config.json"):
        generation_config(str(folder))


@pytest.mark.parametrize(
    ("family", "shape", "wrong", "said"),
    [
        ("llama", {}, {"head_dim": 10**12}, "asks for .* parameters, and its files have"),
        ("gpt_neo", {}, {"max_position_embeddings": 60_000}, "asks for .* parameters, and its files have"),
        ("gpt_neo", {"hidden_size": 4, "max_position_embeddings": 30_000}, {}, "bytes of buffers beside its weights"),
        ("llama", {}, {"rope_parameters": LONG}, "`long_factor` of the model m has 3 numbers"),
    ],
)
def test_an_impossible_size_is_refused_before_memory_is_allocated(
    family: str, shape: dict[str, int], wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPES[family], **shape}))
    tensors = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "m" / "config.json").write_text(json.dumps(model.config.to_dict() | wrong))
    with pytest.raises(UserError, match=said):
        blank_model(ModelBlock(name="m"), tmp_path, seed=0)
