"""The text side of a model: its context, its stop tokens, its tokenizer, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from families import tiny
from stoker.errors import UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.load_job import load_job
from stoker.models.context_length import stated_context
from stoker.models.model_source import ModelSource
from stoker.models.text import TextSide, open_text_side
from stoker.models.tokenizers.job_tokenizer import chat_template, load_tokenizer_from
from tiny_llama import save_tokenizer


@pytest.fixture
def base(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A folder with a model (64 positions), its tokenizer, and a row of data."""
    fast = save_tokenizer(tmp_path / "m", tokenizer, template=None)
    tiny("llama", dtype=torch.float32, vocab_size=len(fast)).save_pretrained(tmp_path / "m")
    rows = [{"prompt": f"how are you {i}?", "completion": "I am well, thank you"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def text_side(base: Path, *lines: str, model: str = "m") -> TextSide:
    job = base / "job.yaml"
    job.write_text("\n".join(["task: sft", f"model: {base / model if model == 'm' else model}", *lines]) + "\n")
    return open_text_side(load_job(job, [f"data={base / 'rows.jsonl'}"]), base)


def test_the_length_is_lowered_to_the_models_context(base: Path) -> None:
    assert text_side(base).seq_len == 64
    assert text_side(base, "train: {seq_len: 32}").seq_len == 32
    assert text_side(base, "train: {seq_len: 64}").seq_len == 64


def test_virtual_tokens_take_their_part_of_the_context(base: Path) -> None:
    def with_tokens(count: int, *lines: str) -> TextSide:
        return text_side(base, f"tune: {{method: prompt, tokens: {count}}}", *lines)

    assert [(text.seq_len, text.context) for text in (with_tokens(40), with_tokens(56))] == [(24, 24), (8, 8)]
    with pytest.raises(UserError, match="57 virtual tokens leave no room in the 64 "):
        with_tokens(57)
    with pytest.raises(UserError, match=r"25 is above the 24 tokens .* 40 virtual ones left out; write 24 or less"):
        with_tokens(40, "train: {seq_len: 25}")


def test_rows_may_be_as_long_as_the_context_of_a_model_beside_the_trained_one(base: Path) -> None:
    text, loaded = text_side(base), load_job(base / "job.yaml", [f"data={base / 'rows.jsonl'}"])
    text.check_fits(64, loaded, "model.name", "m")
    with pytest.raises(UserError, match="rows have up to 65 tokens, and m was built for 64"):
        text.check_fits(65, loaded, "model.name", "m")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_positions": 9}, 9),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 7}}, 7),
        ({"model_type": "bloom", "seq_length": 9}, None),  # ALiBi
        ({"model_type": "mamba"}, None),
    ],
)
def test_the_stated_context_of_a_local_model(config: dict[str, Any], expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert stated_context(ModelBlock(name="m"), tmp_path) == expected


def test_a_length_above_the_context_is_refused_at_its_place(base: Path) -> None:
    with pytest.raises(UserError, match=r"job\.yaml:3:18: .*65 is above the 64 tokens.*write 64 or less"):
        text_side(base, "train: {seq_len: 65}")


def test_the_stop_tokens_are_those_a_server_would_take(base: Path, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    other = tokenizer.token_to_id("<|endoftext|>")
    GenerationConfig(eos_token_id=[end, other]).save_pretrained(base / "m")
    text = text_side(base)
    assert text.codec.stop_ids == {end, other} and text.codec.end_id == end
    for stops, expected in ((None, {end}), (other, {end, other})):
        GenerationConfig(eos_token_id=stops).save_pretrained(base / "m")
        assert text_side(base).codec.stop_ids == expected


def test_a_tokenizer_without_a_template_gets_the_default(base: Path) -> None:
    text = text_side(base)
    assert not text.own_template and "### Instruction" in chat_template(text.tokenizer)[0]
    text.tokenizer.chat_template = "mine"
    assert chat_template(text.tokenizer) == ("mine", True)


@pytest.mark.parametrize("template", [5, {"default": 5}, {"a": 1}])
def test_a_template_that_is_no_text_is_refused(base: Path, template: Any) -> None:
    tokenizer = text_side(base).tokenizer
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="must be text, or texts by their names"):
        chat_template(tokenizer)


@pytest.mark.parametrize("wrong", [{"eos_token_id": "x"}, {"rms_norm_eps": "abc"}, {"dtype": "load"}])
def test_errors_of_the_configuration_are_not_the_tokenizers(base: Path, wrong: dict[str, str]) -> None:
    file = base / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserError, match=r"the configuration of the model .* cannot be read"):
        load_tokenizer_from(ModelSource("folder", str(base / "m")))


def test_a_model_from_scratch_learns_its_vocabulary_once(base: Path) -> None:
    text, again = (text_side(base, model="llama-3m") for _ in range(2))
    assert len(text.tokenizer) <= 4096 and text.seq_len <= 1024
    assert again.codec.fingerprint == text.codec.fingerprint
    words = "how are you, thank you"
    assert text.tokenizer.decode(text.tokenizer(words)["input_ids"]) == words


def test_a_tokenizer_that_is_nowhere_is_a_users_mistake(base: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer 'nowhere'"):
        _with_tokenizer(base, "nowhere")


def _with_tokenizer(base: Path, name: str) -> TextSide:
    job = base / "job.yaml"
    job.write_text(f"task: sft\nmodel:\n  name: {base / 'm'}\n  tokenizer: {name}\ndata: {base / 'rows.jsonl'}\n")
    return open_text_side(load_job(job), base)


def test_another_tokenizer_is_taken_from_its_folder(base: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(base / "m")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(base / "other")
    assert _with_tokenizer(base, str(base / "other")).own_template


def test_a_text_without_tokens_does_not_begin_a_prompt(base: Path) -> None:
    text = text_side(base)
    job = base / "job.yaml"
    job.write_text(f"task: sft\nmodel: {base / 'm'}\ndata: {base / 'rows.jsonl'}\ntune: {{method: prompt, text: ''}}\n")
    with pytest.raises(UserError, match=r"`tune\.text` has no tokens") as raised:
        text.prompt_ids(load_job(job).job)
    assert raised.value.problems[0].key == "tune.text"
