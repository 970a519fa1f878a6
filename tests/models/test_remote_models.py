"""Models and tokenizers at URLs: the same weights as from the folder, fetched when they are needed, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from counting_origin import CountingOrigin
from loading import load_model
from tokenizers import Tokenizer

from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.models.model_source import model_problem, require_model, tokenizer_problem
from stoker.models.tokenizers.job_tokenizer import load_tokenizer_from
from stoker.node_cache import object_cache, remote_folder
from stoker.node_cache.remote_folder import is_remote, with_weights
from stoker.plan.planned_job import shape_of_name
from tiny_llama import save_tiny_llama

NOWHERE = Path("/nowhere")


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingOrigin]:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    remote_folder._local_path.cache_clear()
    with CountingOrigin() as served:
        yield served
    remote_folder._local_path.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer, origin: CountingOrigin) -> Path:
    """A model here, and the same below ``m/`` at the origin."""
    folder = save_tiny_llama(tmp_path / "tiny", tokenizer)
    publish(folder, origin)
    return folder


def publish(folder: Path, origin: CountingOrigin) -> None:
    origin.objects |= {f"m/{file.name}": file.read_bytes() for file in folder.iterdir()}


def weights_of(where: str) -> dict[str, torch.Tensor]:
    return load_model(ModelBlock(name=where), NOWHERE, seed=0).state_dict()


def test_a_model_at_a_web_address_is_the_one_of_the_folder(folder: Path, origin: CountingOrigin) -> None:
    block = ModelBlock(name=f"{origin.url}/m")
    assert model_problem(block, NOWHERE) is None
    source = require_model(block.name, NOWHERE)
    assert source.kind == "folder" and is_remote(Path(source.where))
    assert shape_of_name(block.name, NOWHERE).layers == 2
    text = load_tokenizer_from(source)("the sea")["input_ids"]
    assert text == load_tokenizer_from(require_model(str(folder), NOWHERE))("the sea")["input_ids"]
    assert "m/model.safetensors" not in origin.sent  # not before they are needed
    here, there = weights_of(str(folder)), weights_of(block.name)
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    weights_of(block.name)
    assert origin.asked("GET", "m/model.safetensors") == 1
    assert origin.sent["m/model.safetensors"] == len(origin.objects["m/model.safetensors"])


def test_the_files_of_an_index_are_found(tmp_path: Path, folder: Path, origin: CountingOrigin) -> None:
    from transformers import AutoModelForCausalLM

    origin.objects.clear()
    parts = tmp_path / "parts"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(parts, max_shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    publish(parts, origin)
    here, there = weights_of(str(folder)), weights_of(f"{origin.url}/m/")
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_folder_of_a_store_with_listings(folder: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for file in folder.iterdir():
        system.pipe_file(f"/models/m/{file.name}", file.read_bytes())
    try:
        here, there = weights_of(str(folder)), weights_of("memory://models/m")
        assert all(torch.equal(here[name], there[name]) for name in here)
    finally:
        system.rm("/models", recursive=True)


def test_a_tokenizer_alone(folder: Path, origin: CountingOrigin) -> None:
    for name in list(origin.objects):
        if "token" not in name:
            del origin.objects[name]
    block = ModelBlock(name="llama-3m", tokenizer=f"{origin.url}/m")
    assert tokenizer_problem(block, NOWHERE) is None
    gone = ModelBlock(name="llama-3m", tokenizer=f"{origin.url}/n")
    assert "there is no model in" in (tokenizer_problem(gone, NOWHERE) or ("",))[0]


def test_what_is_no_model(folder: Path, origin: CountingOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "FRESH", -1.0)

    def problem(name: str) -> str:
        return (model_problem(ModelBlock(name=name), NOWHERE) or ("",))[0]

    assert problem(f"{origin.url}/nothing") == f"there is no model in {origin.url}/nothing"
    assert problem("s4://b/m") == "there is no kind of store s4:// (s4://b/m)"
    del origin.objects["m/model.safetensors"]
    origin.objects["m/pytorch_model.bin"] = b"1"
    assert "only pickled weights (pytorch_model.bin)" in problem(f"{origin.url}/m")
    del origin.objects["m/pytorch_model.bin"]
    remote_folder._local_path.cache_clear()
    assert "holds no weights" in problem(f"{origin.url}/m")


def test_damaged_weights_name_the_model(folder: Path, origin: CountingOrigin) -> None:
    origin.objects["m/model.safetensors"] = origin.objects["m/model.safetensors"][:1000]
    with pytest.raises(UserError, match="cannot be loaded"):
        weights_of(f"{origin.url}/m")


def test_names_that_lead_out_of_the_folder_are_refused(origin: CountingOrigin) -> None:
    origin.objects["m/config.json"] = b"{}"
    origin.objects["m/model.safetensors.index.json"] = b'{"weight_map": {"a": "../secret.safetensors"}}'
    origin.objects["secret.safetensors"] = b"1"
    where = Path(require_model(f"{origin.url}/m", NOWHERE).where)
    with_weights(where)
    assert not list(where.parent.glob("secret*")) and "secret.safetensors" not in origin.sent


def test_a_folder_of_this_machine_by_its_url(folder: Path) -> None:
    assert require_model(f"file://{folder}", NOWHERE).where == str(folder.resolve())
