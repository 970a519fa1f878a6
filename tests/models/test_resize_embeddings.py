"""Rows for new tokens: means of the old ones, the same however they are read; old rows to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from families import SMALL_GEMMA4, VOCABULARY, tiny
from stoker.errors import UserError
from stoker.hardware.process_device import choose_device
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.blocks.tune_block import TuneBlock
from stoker.job.load_job import load_job
from stoker.job.tokenizer_extension import Extension, read_extension
from stoker.models.build_model import build_meta, build_model
from stoker.models.load_model import Blank, blank_model
from stoker.models.resize_embeddings import add_embedding_rows, rows_by_token, why_rows_untrained
from stoker.models.tokenizers.special_tokens import with_new_tokens
from stoker.models.weight_source import InMemoryWeights, all_rows
from tiny_llama import save_tokenizer

FIRST = 100  # the other 28 rows of the tiny models belong to no token, as in Qwen
PIECES = tuple((i % 7, 3 * i, 99) for i in range(30))  # two tokens more than there is room for


def extension(pieces: tuple[tuple[int, ...], ...] = PIECES, first: int = FIRST) -> Extension:
    return Extension("old", "", "", first, pieces)


def saved(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    model = tiny(family, dtype=torch.float32, **changes)
    model.save_pretrained(folder)
    return model


def job(folder: Path, *lines: str) -> Any:
    (folder / "tokenizer").mkdir(exist_ok=True)
    text = f"task: pretrain\nmodel: {{name: {folder}, tokenizer: {folder}/tokenizer}}\ndata: x.txt\nsteps: 9\n"
    (folder / "job.yaml").write_text("\n".join([text, *lines]) + "\n")
    return load_job(folder / "job.yaml").job


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("gptj", False), ("gpt2", True), ("opt", True)]
)
def test_new_rows_are_the_means_of_their_pieces(family: str, tied: bool, tmp_path: Path) -> None:
    old = saved(family, tmp_path, tie_word_embeddings=tied)
    (tmp_path / "tokenizer").mkdir()
    extension().write(tmp_path / "tokenizer")
    new = build_model(job(tmp_path), tmp_path, choose_device("fp32"))
    assert isinstance(new, PreTrainedModel) and new.config.vocab_size == 192  # 130 tokens in rows of 64
    before, after = rows_by_token(old), rows_by_token(new)
    assert before.keys() == after.keys()
    same = new.get_input_embeddings().weight is new.get_output_embeddings().weight
    assert same == tied
    for name, tensor in before.items():
        found = after[name].detach()
        assert found.shape == (192, *tensor.shape[1:])
        assert torch.equal(found[:FIRST], tensor[:FIRST])
        for i, cut in enumerate(PIECES):
            torch.testing.assert_close(found[FIRST + i], tensor[list(cut)].mean(0), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found[130:], tensor[:FIRST].mean(0).expand_as(found[130:]), rtol=1e-5, atol=1e-6)
    ids = torch.arange(0, FIRST, 9)[None]
    assert torch.allclose(new(ids).logits[..., :FIRST], old.float()(ids).logits[..., :FIRST], atol=1e-5)


def test_what_is_saved_is_a_model_with_the_new_rows(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "tokenizer").mkdir()
    extension().write(tmp_path / "tokenizer")
    new = build_model(job(tmp_path), tmp_path, choose_device("fp32"))
    new.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 105, 129]])
    assert torch.equal(again(ids).logits, new.eval()(ids).logits)


def test_parts_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved("llama", tmp_path).get_input_embeddings().weight.detach()
    blank, new = add_embedding_rows(blank_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0), extension())
    (name,) = {n for n in new.names if "embed" in n}
    whole = blank.weights.read(name, all_rows((192, 32)))
    for start, stop in ((0, 40), (90, 101), (100, 101), (101, 140), (129, 192), (150, 151), (40, 192)):
        assert torch.equal(blank.weights.read(name, (slice(start, stop), slice(0, 32))), whole[start:stop])
    for i, cut in enumerate(PIECES):
        torch.testing.assert_close(whole[FIRST + i], old[list(cut)].mean(0), rtol=1e-6, atol=1e-7)
    monkeypatch.setattr("stoker.models.resize_embeddings.AT_ONCE", 7)  # old rows are read in parts, too
    torch.testing.assert_close(blank.weights.read(name, all_rows((192, 32))), whole, rtol=1e-6, atol=1e-7)


def test_a_model_from_scratch_and_spare_rows(tmp_path: Path) -> None:
    blank, _ = add_embedding_rows(
        blank_model(ModelBlock(name="llama-3m"), tmp_path, seed=0), extension(((1, 2),), 4096)
    )
    assert blank.model.config.vocab_size == 4160
    spare, _ = add_embedding_rows(
        blank_model(ModelBlock(name="llama-3m"), tmp_path, seed=0), extension(((1, 2),), 4000)
    )
    assert spare.model.config.vocab_size == 4096
    read = spare.weights.read("model.embed_tokens.weight", all_rows((4096, 192)))
    assert torch.allclose(read[4000], read[[1, 2]].mean(0)) and torch.equal(read[4001], read[4095])


def test_weights_that_are_there_already_are_enlarged_in_place() -> None:
    model = tiny("llama", dtype=torch.float32, tie_word_embeddings=False)
    before = {name: tensor.detach().clone() for name, tensor in rows_by_token(model).items()}
    add_embedding_rows(Blank(model, InMemoryWeights({})), extension())
    for name, tensor in rows_by_token(model).items():
        assert torch.equal(tensor[:FIRST], before[name][:FIRST]) and tensor.shape[0] == 192
        assert torch.allclose(tensor[101], before[name][list(PIECES[1])].mean(0))


def test_a_smaller_models_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokens \(old\), and this model has rows for 4,096"):
        add_embedding_rows(blank_model(ModelBlock(name="llama-3m"), tmp_path, seed=0), extension(((1,),), 5000))


def test_embeddings_for_every_block_get_no_rows() -> None:
    model = tiny("gemma4_text", **SMALL_GEMMA4)
    with pytest.raises(UserError, match="every block of this model embeds the tokens"):
        add_embedding_rows(Blank(model, InMemoryWeights({})), extension())


def test_adapters_must_train_the_new_rows(tmp_path: Path) -> None:
    saved("llama", tmp_path, tie_word_embeddings=False)
    (tmp_path / "tokenizer").mkdir()
    extension().write(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"freezes lm_head, and new tokens are learned only if lm_head, embed_tokens"):
        build_meta(job(tmp_path, "tune: {method: lora}"), tmp_path, choose_device("fp32"))
    blank, new = add_embedding_rows(blank_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0), extension())

    def why(*whole: str) -> str | None:
        return why_rows_untrained(blank.model, new, TuneBlock(method="lora", modules_to_save=list(whole)))

    assert why("lm_head") is not None
    assert why("lm_head", "embed_tokens") is None and why("lm_head", "*embed_tokens") is None
    assert why_rows_untrained(blank.model, new, TuneBlock()) is None


@pytest.mark.parametrize("named", ["embed_tokens", "lm_head", "*embed_tokens"])
def test_one_name_trains_the_new_rows_of_tied_layers(named: str, tmp_path: Path) -> None:
    saved("llama", tmp_path, tie_word_embeddings=True)
    blank, new = add_embedding_rows(blank_model(ModelBlock(name=str(tmp_path)), tmp_path, seed=0), extension())
    assert why_rows_untrained(blank.model, new, TuneBlock(method="lora", modules_to_save=[named])) is None


def test_a_special_token_consists_of_old_tokens_even_where_it_is_cut_into_new_ones(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    fast = save_tokenizer(tmp_path, tokenizer, template=None)
    first = len(fast)
    fast.add_tokens(["zq"])
    before = extension(((5, 6),), first)
    block = ModelBlock.model_validate({"name": "m", "special_tokens": {"additional": ["<zq>"]}})
    found = with_new_tokens(fast, block, before)
    left, right = fast.convert_tokens_to_ids(["<", ">"])
    assert found is not None and (found.first, found.pieces) == (first, ((5, 6), (left, 5, 6, right)))
    assert (found.extends, found.before) == (before.extends, before.before)
    assert with_new_tokens(fast, block, found) is found  # it has them now


def test_the_record_is_read_as_written_and_damage_is_told(tmp_path: Path) -> None:
    extension().write(tmp_path)
    assert read_extension(tmp_path) == extension()
    assert extension().rows(VOCABULARY) == 192 and extension().rows(200) == 200
    content = json.loads((tmp_path / "extension.json").read_text())
    (tmp_path / "extension.json").write_text(json.dumps({**content, "pieces": [[100]]}))
    with pytest.raises(UserError, match="cannot be read: a new token consists of no old ones"):
        read_extension(tmp_path)
