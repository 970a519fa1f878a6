"""ChatGLM2, ChatGLM3 and GLM-4 in their first format: the model, the tokenizer, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import torch
from chatglm_files import LAYERS, TEXT, logits, stored_tensors, write_chatglm
from loading import load_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stoker.checkpoint.export.model_card import public_name, warnings_of
from stoker.errors import RunFailed, UserError
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.schema import Job
from stoker.models.model_source import ModelSource, find_model, model_problem
from stoker.models.tokenizers.job_tokenizer import load_tokenizer_from, served_stop_ids
from stoker.plan.shapes.find_shape import shape_of_model

CHAT = [
    {"role": "system", "content": "You feed  the fire.\n"},
    {"role": "user", "content": "what is 火?"},
    {"role": "assistant", "content": " sophisticated\tfire"},
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("ratio", [1, 50])
def test_its_logits_are_those_of_its_own_code(tmp_path: Path, ratio: int) -> None:
    folder = write_chatglm(tmp_path / "glm", rope_ratio=ratio)
    model = load_model(ModelBlock(name=str(folder)), tmp_path, seed=0, dtype=torch.float64)
    ids = torch.randint(0, 330, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = logits(stored_tensors(), ids, base=10_000.0 * ratio)
    # transformers computes the angles in float32
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-5)
    assert model.config.model_type == "glm"


def test_weights_in_several_files_and_pickled_ones_are_the_same(tmp_path: Path) -> None:
    whole = write_chatglm(tmp_path / "whole")
    split = write_chatglm(tmp_path / "split")
    tensors = load_file(split / "model.safetensors")
    (split / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, split / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    pickled = write_chatglm(tmp_path / "pickled", weights="pytorch_model.bin")
    blocks = [
        ModelBlock(name=str(whole)),
        ModelBlock(name=str(split)),
        ModelBlock(name=str(pickled), allow_pickle=True),
    ]
    first, *others = (load_model(block, tmp_path, seed=0).state_dict() for block in blocks)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    problem = model_problem(ModelBlock(name=str(pickled)), tmp_path)
    assert problem is not None
    assert "contains only pickled weights" in problem[0]


def test_another_checkpoint_in_the_same_folder_is_read_again(tmp_path: Path) -> None:
    folder = write_chatglm(tmp_path / "glm")
    first = load_model(ModelBlock(name=str(folder)), tmp_path, seed=0).state_dict()
    save_file(stored_tensors(seed=1), folder / "model.safetensors")
    second = load_model(ModelBlock(name=str(folder)), tmp_path, seed=0).state_dict()
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


def test_chats_of_chatglm3_are_tokenised_as_its_own_code_does(tmp_path: Path) -> None:
    folder = write_chatglm(tmp_path / "glm")
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    pieces = own.vocab_size()
    expected = [pieces + 1, pieces + 3]  # [gMASK] sop
    for number, turn in enumerate(CHAT):  # each text on its own, with a space before it
        expected += [pieces + 5 + number, *own.encode("\n"), *own.encode(turn["content"])]
    tokenizer = load_tokenizer_from(ModelSource("folder", str(folder)))
    made = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert made == [*expected, own.eos_id()]
    asked = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert made[: len(asked)] == asked
    assert tokenizer.convert_ids_to_tokens(asked[-1]) == "<|assistant|>"
    assert tokenizer("the fire").input_ids == [*expected[:2], *own.encode("the fire")]
    assert tokenizer.decode(own.encode(TEXT)) == TEXT
    block = ModelBlock(name=str(folder))
    stops = served_stop_ids(tokenizer, find_model(str(folder), tmp_path), block)
    assert stops == {own.eos_id(), pieces + 6, pieces + 8}


def test_chats_of_chatglm2_count_rounds(tmp_path: Path) -> None:
    tokenizer = load_tokenizer_from(ModelSource("folder", str(write_chatglm(tmp_path / "glm", roles=False))))
    assert "<|user|>" not in tokenizer.get_vocab()
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False)
    assert text == "[gMASK]sop[Round 1]\n\n问：one\n\n答： two\n\n[Round 2]\n\n问：three\n\n答： four</s>"


def test_the_tokenizer_of_glm4_is_tiktokens(tmp_path: Path) -> None:
    folder = write_chatglm(tmp_path / "glm")
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merged in (b"th", b"the", b" f", b"ir", b" fir", b" fire", b"\xe7\x81", b"\xe7\x81\xab", b"st", b"sto"):
        ranks[merged] = len(ranks)
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (folder / "tokenizer.model").write_text("\n".join(lines))
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
    names += ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    special = {name: len(ranks) + number for number, name in enumerate(names)}
    settings = {"added_tokens_decoder": {str(i): {"content": name, "special": True} for name, i in special.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer_from(ModelSource("folder", str(folder)))
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    own = tiktoken.Encoding("glm4", pat_str=rf"{pattern}|\s+(?!\S)|\s+", mergeable_ranks=ranks, special_tokens={})
    expected = [special["[gMASK]"], special["<sop>"]]
    for turn in CHAT:
        expected += [special[f"<|{turn['role']}|>"], *own.encode(f"\n{turn['content']}")]
    made = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert made == [*expected, special["<|endoftext|>"]]
    assert tokenizer.decode(own.encode(TEXT)) == TEXT


REFUSED = {
    "the first": ({"position_encoding_2d": True}, "attention of its prompts also sees the later tokens"),
    "images": ({"vision_config": {"hidden_size": 8}}, "GLM-4V in this format"),
    "quantised": ({"quantization_bit": 4}, "stored quantised"),
    "biases": ({"add_bias_linear": True}, "`add_bias_linear` is True, and only False is supported"),
    "prefixes": ({"pre_seq_len": 128}, "`pre_seq_len` is 128, and only None is supported"),
    "missing": ({"kv_channels": None}, "`kv_channels` is missing"),
    "divided": ({"rope_ratio": 16, "_name_or_path": "THUDM/chatglm2-6b-32k"}, "divides its positions"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_glm_cannot_compute_is_refused_with_its_file(tmp_path: Path, config: dict, message: str) -> None:
    folder = write_chatglm(tmp_path / "glm", **config)
    problem = model_problem(ModelBlock(name=str(folder)), tmp_path)
    assert problem is not None
    assert f"{folder / 'config.json'}: " in problem[0]
    assert message in problem[0]
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(ModelBlock(name=str(folder)), tmp_path, seed=0)


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.1.mlp.dense_4h_to_h", "layers.1.mlp.other"): t for name, t in tensors.items()}


def _shorter(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t[:-1].clone() if "query_key_value.weight" in name else t for name, t in tensors.items()}


def _without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if f"layers.{LAYERS - 1}.self_attention.dense" not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed, "layers.1.mlp.other.weight is no tensor of ChatGLM2"),
        (_shorter, "has 63 rows, and its configuration asks for 64"),
        (_without, f"contains no weights for model.layers.{LAYERS - 1}.self_attn.o_proj.weight"),
    ],
)
def test_other_weights_are_refused_and_leave_nothing_in_the_cache(
    tmp_path: Path, change: Callable[[dict], dict], message: str
) -> None:
    folder = write_chatglm(tmp_path / "glm")
    save_file(change(stored_tensors()), folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(ModelBlock(name=str(folder)), tmp_path, seed=0)
    assert not list((tmp_path / "cache").rglob(".partial-*"))


def test_a_full_disk_is_an_error_that_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RunFailed, match=r"cache.*the cache cannot be written: .*No space left"):
        load_model(ModelBlock(name=str(write_chatglm(tmp_path / "glm"))), tmp_path, seed=0)
    assert not list((tmp_path / "cache").rglob(".partial-*"))


def test_the_planner_counts_its_parameters(tmp_path: Path) -> None:
    folder = write_chatglm(tmp_path / "glm")
    stored = sum(t.numel() for name, t in stored_tensors().items() if "inv_freq" not in name)
    assert shape_of_model(str(folder)).parameters == stored


def test_one_of_the_hub_is_read_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--org--glm"
    version = "0123456789abcdef0123456789abcdef01234567"
    folder = write_chatglm(repository / "snapshots" / version)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(version)
    block = ModelBlock(name="org/glm")
    model = load_model(block, tmp_path, seed=0)
    same = load_model(ModelBlock(name=str(folder)), tmp_path, seed=0)
    torch.testing.assert_close(model.state_dict(), same.state_dict(), rtol=0, atol=0)
    tokenizer = load_tokenizer_from(ModelSource("hub", "org/glm"))
    assert served_stop_ids(tokenizer, find_model("org/glm", tmp_path), block) > {tokenizer.eos_token_id}
    job = Job.model_validate({"task": "sft", "model": {"name": "org/glm"}, "data": [{"path": "rows"}], "steps": 1})
    (warning,) = warnings_of(job, "adapter", public_name(job, tmp_path), model)
    assert "Stoker reads the base as transformers' Glm" in warning
    own_code = job.model_copy(update={"model": ModelBlock(name="org/glm", trust_remote_code=True)})
    assert not warnings_of(own_code, "adapter", public_name(own_code, tmp_path), model)
