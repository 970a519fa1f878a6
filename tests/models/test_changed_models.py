"""Models with random weights and with changed keys of their configuration (`model.weights`, `model.config`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_model
from transformers import AutoConfig, AutoModelForCausalLM

from families import SHAPES, tiny
from stoker.cli.main import main
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.context_length import stated_context
from stoker.models.hf_config import config_of
from stoker.plan.shapes.changed_config import changed_config
from stoker.plan.shapes.find_shape import shape_of_model

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
JOB = "task: pretrain\nmodel: {{name: m, tokenizer: smollm2-135m, weights: random{}}}\ndata: t.txt\nsteps: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model `m` that has a configuration, and neither weights nor a tokenizer."""
    monkeypatch.chdir(tmp_path)
    AutoConfig.for_model("qwen3", **{**SHAPES["qwen3"], "vocab_size": 128}).save_pretrained("m")
    Path("t.txt").write_text("one two three\n" * 50)
    return tmp_path


def random(**config: Any) -> ModelBlock:
    return ModelBlock(name="m", weights="random", config=config)


def test_random_weights_need_a_configuration_only_and_follow_the_seed(folder: Path) -> None:
    one, again, other = (load_model(random(), folder, seed=seed, stop_id=7) for seed in (3, 3, 4))
    assert one.config.model_type == "qwen3" and (one.config.eos_token_id, one.config.pad_token_id) == (7, None)
    for p, q, r in zip(one.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and (p.dim() == 1 or not torch.equal(p, r))
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        load_model(ModelBlock(name="m"), folder, seed=3)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_changed_sizes_make_the_model_that_the_planner_counts(family: str, folder: Path) -> None:
    AutoConfig.for_model(family, **{**SHAPES[family], "vocab_size": 128}).save_pretrained("m")
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    changes = {layers: 4, "vocab_size": 96}
    model = load_model(random(**changes), folder, seed=0)
    assert len(model.get_input_embeddings().weight) == 96 and model.config.num_hidden_layers == 4
    assert len(getattr(model.config, "layer_types", None) or range(4)) == 4
    assert shape_of_model(str(folder / "m"), changes).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_stored_weights_with_another_scaling_of_positions(family: str, folder: Path) -> None:
    model = tiny(family, dtype=torch.float32).eval()
    model.save_pretrained("m")
    changes = {"rope_parameters": YARN, "max_position_embeddings": 256}
    block = ModelBlock(name="m", config=changes)
    loaded = load_model(block, folder, seed=0).eval()
    assert stated_context(block, folder) == loaded.config.max_position_embeddings == 256
    rope = {**model.config.rope_parameters, **YARN}
    wanted = AutoModelForCausalLM.from_pretrained("m", rope_parameters=rope, max_position_embeddings=256).eval()
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(input_ids=ids).logits, wanted(input_ids=ids).logits)
    assert not torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    tiny("gpt2", dtype=torch.float32).save_pretrained("no-rope")
    with pytest.raises(UserError, match="no key `rope_scaling`"):
        load_model(ModelBlock(name="no-rope", config={"rope_scaling": YARN}), folder, seed=0)
    with pytest.raises(UserError, match=r"lm_head|embed_tokens"):
        load_model(ModelBlock(name="m", config={"vocab_size": 96}), folder, seed=0)


@pytest.mark.parametrize(
    "stored",
    [
        {"rope_theta": 5e5, "rope_scaling": {**YARN, "beta_fast": 16.0}},
        {"rope_parameters": {"rope_theta": 5e5, **YARN, "beta_fast": 16.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_positions_keep_their_base_and_lose_the_numbers_of_another_scaling(
    stored: dict[str, Any], folder: Path
) -> None:
    Path("m", "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, **stored}))

    def changed(**config: Any) -> Any:
        return config_of("m", random(**config)).rope_parameters

    for key in ("rope_scaling", "rope_parameters"):
        assert changed(**{key: LINEAR}) == {"rope_theta": 5e5, **LINEAR}
        assert changed(**{key: None}) == {"rope_theta": 5e5, "rope_type": "default"}
        assert changed(**{key: {"factor": 2.0}}) == {"rope_theta": 5e5, **YARN, "beta_fast": 16.0, "factor": 2.0}


@pytest.mark.parametrize(
    "stored",
    [
        {"rope_scaling": LINEAR, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_positions_that_differ_by_the_kind_of_layer_are_changed_by_kind(stored: dict[str, Any], folder: Path) -> None:
    Path("m", "config.json").write_text(json.dumps({"model_type": "gemma3_text", "num_hidden_layers": 2, **stored}))

    def changed(**config: Any) -> Any:
        return config_of("m", random(**config)).rope_parameters

    sliding = {"rope_type": "default", "rope_theta": 1e4}
    for asked, full in (
        ({"full_attention": {"factor": 2.0}}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
        ({"full_attention": YARN}, {**YARN, "rope_theta": 1e6}),
        (None, {"rope_type": "default", "rope_theta": 1e6}),
    ):
        assert changed(rope_parameters=asked) == {"full_attention": full, "sliding_attention": sliding}
    with pytest.raises(UserError, match="differ by the kind of layer; write `rope_scaling` with the kinds to be chang"):
        changed(rope_scaling=YARN)


def test_lists_by_layer_stay_where_the_number_of_layers_does() -> None:
    stored = {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert changed_config(stored, {"num_hidden_layers": 2, "vocab_size": 96})["layer_types"] == ["a", "b"]
    assert "layer_types" not in changed_config(stored, {"num_hidden_layers": 4})


def test_keys_of_an_inner_language_model_are_changed_there() -> None:
    whole = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"]}}
    assert changed_config(whole, {"num_hidden_layers": 3})["text_config"] == {"num_hidden_layers": 3}


def test_a_list_that_has_as_many_entries_as_blocks_by_chance_is_kept() -> None:
    kept = {"eos_token_id": [1, 2], "mlp_only_layers": [0, 1], "time_step_limit": [0.0, 1.0]}
    old = {"num_hidden_layers": 2, "layer_types": ["a", "b"], **kept}
    assert changed_config(old, {"num_hidden_layers": 4}) == {"num_hidden_layers": 4, **kept}


@pytest.mark.parametrize(
    ("more", "place", "words"),
    [
        (", config: {num_hiden_layers: 3}", "2:87", "no key `num_hiden_layers`; write `num_hidden_layers`"),
        (", config: {model_type: llama}", "2:81", "`model_type` cannot be changed"),
        (", config: {num_hidden_layers: x}", "2:60", "num_hidden_layers"),
        ("}\ntune: {method: lora", "2:52", "`tune: lora` freezes the model, and its random weights must be trained"),
        (", quantise: 8bit", "2:52", "`model.quantise: 8bit` freezes the base"),
    ],
)
def test_what_cannot_be_is_said_before_training(
    more: str, place: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(JOB.format(more))
    for verb in ("check", "train"):
        assert main([verb, "job.yaml"]) == 2
        assert words in (error := capsys.readouterr().err) and f"job.yaml:{place}" in error, error
    assert not Path("runs").exists()


def test_sizes_of_the_catalogue_have_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(JOB.format(", config: {vocab_size: 96}").replace("name: m,", "name: llama-3m,"))
    assert main(["check", "job.yaml"]) == 2
    error = capsys.readouterr().err
    assert "`model.weights` has no effect: llama-3m" in error and "`model.config` has no effect: llama-3m" in error


def test_the_configuration_of_the_block_is_that_of_the_model(folder: Path) -> None:
    assert config_of("m", random(hidden_size=48)).hidden_size == 48
    assert config_of("m", random()).hidden_size == 32
    assert random(hidden_size=48).of_other("n") == ModelBlock(name="n")
