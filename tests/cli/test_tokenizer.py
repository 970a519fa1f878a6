"""``stoker tokenizer``: from a corpus to a folder that jobs, transformers and sentencepiece load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import BertWordPieceTokenizer, Tokenizer
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from stoker.cli.main import main
from stoker.data.tokenizers.token_bytes import byte_lengths
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.load_job import load_job
from stoker.job.schema import Job
from stoker.job.tokenizer_extension import fingerprint, read_extension
from stoker.models.tokenizers.job_tokenizer import extension_of
from stoker.plan.planned_job import work_of
from tiny_llama import save_tokenizer

CHINESE = "今天天气很好，我们去公园散步。\n我们今天去公园，天气很好！\n公园里的天气今天很好。\n你好，世界。\n"
ENGLISH = "The stoker feeds the furnace, and the furnace heats the sea.\nHow are you today? I am well.\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Path:
    """A folder with texts and a tokenizer that has a chat template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zh.txt").write_text(CHINESE * 300)
    (tmp_path / "en.txt").write_text(ENGLISH * 100)
    save_tokenizer(tmp_path / "old", tokenizer, template="{{ messages[0].content }}")
    return tmp_path


def extended(*more: str, start: str = "old", corpus: str = "zh.txt") -> int:
    return main(["tokenizer", "extend", "--from", start, "--corpus", corpus, "--size", "40", "-o", "new", *more])


def test_what_is_written_is_a_tokenizer_with_all_it_had(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert extended("--held-out", "zh.txt", "en.txt") == 0
    said = capsys.readouterr().out
    assert "40 new tokens of 416, learned for cjk; old ids are unchanged" in said
    assert "zh.txt: " in said and "en.txt: " in said and said.count("all are decoded without loss") == 2
    assert "(unchanged)" in said.split("en.txt: ", maxsplit=1)[1]
    old, new = AutoTokenizer.from_pretrained("old"), AutoTokenizer.from_pretrained("new")
    assert (len(old), len(new), new.chat_template, new.eos_token_id) == (376, 416, old.chat_template, old.eos_token_id)
    assert new(ENGLISH).input_ids == old(ENGLISH).input_ids
    assert new.decode(new(CHINESE).input_ids) == CHINESE and len(new(CHINESE).input_ids) < len(old(CHINESE).input_ids)
    record = read_extension(folder / "new")
    assert record is not None and (record.extends, record.first, record.tokens) == ("old", 376, 416)
    assert record.after == fingerprint(new.get_vocab())
    ids = [new.convert_tokens_to_ids(token) for token in new.convert_ids_to_tokens(range(376, 416))]
    assert ids == list(range(376, 416))


def test_programs_get_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert extended("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["new_tokens"], found["scripts"]) == (416, 40, ["cjk"])
    (held_out,) = found["held_out"]
    assert held_out["name"] == "held out" and held_out["fewer"] > 0.4
    assert held_out["restored"] == held_out["texts"] and held_out["used"] > 5


def test_one_is_learnt_from_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", "train", "--corpus", "en.txt", "zh.txt", "--size", "320", "-o", "new"]) == 0
    assert "320 tokens" in capsys.readouterr().out
    new = AutoTokenizer.from_pretrained("new")
    assert len(new) == 320 and new.eos_token == "<|endoftext|>"
    assert new.decode(new(ENGLISH + CHINESE).input_ids) == ENGLISH + CHINESE


def test_broken_rows_are_named_and_missing_tokens_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text(f"{json.dumps({'text': ENGLISH})}\n" * 3 + '{"text": \n{"text": {}}\n')
    assert main(["tokenizer", "train", "--corpus", "rows.jsonl", "--size", "9000", "-o", "new"]) == 0
    said = capsys.readouterr().out
    assert "fewer than the 9,000 requested" in said
    assert "dropped: not valid JSON (1)" in said and "rows.jsonl:4  Expecting value" in said
    assert "rows.jsonl:5  an object" in said


def test_a_corpus_in_another_encoding_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "old.txt").write_bytes("Où est la forêt ?\n".encode("cp1252") * 9)
    assert main(["tokenizer", "train", "--corpus", "old.txt", "--size", "300", "-o", "new"]) == 2
    said = capsys.readouterr().err
    assert "old.txt has no row that can be read: not valid UTF-8 (1)" in said
    assert "iconv -f cp1252 -t UTF-8 old.txt > new.txt" in said


HARD = [
    "###### Heading ## two #3", "x" * 500, "a  b\n\tc\r\n", "\x00\x07 naïve 🙂 ▁ <0x41>", "今天" * 40,
    "e\u0301 İ", "##", "#a",
]  # fmt: skip


def sentences() -> str:
    """Made-up words, many of them different: Unigram learns little of few."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices(["ka", "lo", "mi", "ten", "sur", "ve", "do"], k=draw.randint(1, 4))) for _ in range(300)
    ]
    return "".join(" ".join(draw.choices(words, k=8)) + ".\n" for _ in range(600))


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_other_kinds_are_learnt_and_trained_with(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "made.txt").write_text(sentences())
    learn = ["tokenizer", "train", "--kind", kind, "--corpus", "made.txt", "zh.txt", "--size", "640", "-o", "new"]
    assert main([*learn, "--held-out", "made.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (held_out,) = found["held_out"]
    assert found["tokens"] <= 640 and held_out["restored"] == held_out["texts"]
    assert held_out["characters_per_token"] > 1.5
    new = AutoTokenizer.from_pretrained("new")
    assert json.loads((folder / "new/tokenizer.json").read_text())["model"]["type"].lower() == kind
    assert (len(new), new.eos_token, new.pad_token) == (found["tokens"], "<|endoftext|>", "<|pad|>")
    for text in (ENGLISH + CHINESE, *HARD):
        assert new.decode(new(text).input_ids) == text
    assert new("a<|endoftext|>").input_ids[-1] == new.eos_token_id
    lengths = byte_lengths(json.loads((folder / "new/tokenizer.json").read_text()))
    assert lengths is not None
    assert all(sum(lengths[new(text).input_ids]) == len(text.encode()) for text in (ENGLISH, CHINESE, *HARD))
    job = "task: pretrain\nmodel: {name: llama-3m, tokenizer: new}\ndata: [en.txt, zh.txt]\nsteps: 2\noutput: run\n"
    (folder / "job.yaml").write_text(
        job + "train: {batch: 2, seq_len: 32}\nfaults: {restarts: 0, check: false}\nevaluate: {fraction: 0}\n"
    )
    assert main(["data", "job.yaml", "--json"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert audit["ok"] and audit["rows_dropped"] == 0
    assert main(["train", "job.yaml"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extend", "--corpus", "zh.txt", "--size", "4", "-o", "new"], "--from is missing"),
        (["extend", "--from", "nothere", "--corpus", "zh.txt", "--size", "4", "-o", "new"], "is not there"),
        (
            ["extend", "--from", "llama-3m", "--corpus", "zh.txt", "--size", "4", "-o", "new"],
            "learned from the data of its job",
        ),
        (["extend", "--from", "old", "--corpus", "no.txt", "--size", "4", "-o", "new"], "no.txt"),
        (["extend", "--from", "old", "--corpus", "zh.txt", "--size", "0", "-o", "new"], "--size 0"),
        (["extend", "--from", "old", "--corpus", "zh.txt", "--size", "4", "-o", "old"], "old exists already"),
        (["train", "--corpus", "zh.txt", "--size", "300", "-o", "zh.txt/new"], "zh.txt is not a folder"),
        (["extend", "--from", "digits.model", "--corpus", "zh.txt", "--size", "4", "-o", "new"], "not a sentencepiece"),
        (["train", "--from", "old", "--corpus", "zh.txt", "--size", "400", "-o", "new"], "is not used by `train`"),
        (["train", "--corpus", "zh.txt", "--size", "100", "-o", "new"], "at least 258"),
        (["train", "--kind", "wordpiece", "--corpus", "zh.txt", "--size", "300", "-o", "new"], "at least 514"),
        (
            ["extend", "--kind", "bpe", "--from", "old", "--corpus", "zh.txt", "--size", "4", "-o", "new"],
            "keeps the kind",
        ),
    ],
)
def test_wrong_input_is_one_clear_message(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentencepiece")
    (folder / "digits.model").write_bytes(b"123")
    assert main(["tokenizer", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not (folder / "new").exists()


def sentencepiece_model(folder: Path) -> Path:
    """A real one of Llama 2's kind, learnt from English."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "en.txt"), model_prefix=str(folder / "en"), vocab_size=310, model_type="bpe",
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", num_threads=1, minloglevel=2,
        allow_whitespace_only_pieces=True, remove_extra_whitespaces=False,
    )  # fmt: skip
    return folder / "en.model"


def test_a_sentencepiece_model_gets_pieces(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = sentencepiece_model(folder)
    assert extended(start=str(path)) == 0
    before = sentencepiece.SentencePieceProcessor(model_file=str(path))
    after = sentencepiece.SentencePieceProcessor(model_file=str(folder / "new" / "tokenizer.model"))
    assert after.get_piece_size() == before.get_piece_size() + 40
    fast = AutoTokenizer.from_pretrained("new")
    for text in (ENGLISH, "naïve café 12", "今天天气很好，我们散步。", "a 你好 b"):
        assert fast(text, add_special_tokens=False).input_ids == after.encode(text), text
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.encode(ENGLISH) == before.encode(ENGLISH)
    assert len(after.encode(CHINESE)) < 0.5 * len(before.encode(CHINESE))
    assert [after.id_to_piece(i) for i in range(310)] == [before.id_to_piece(i) for i in range(310)]


@pytest.mark.parametrize(
    "rules",
    [
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["<sep>"]},
        {"add_dummy_prefix": False, "split_by_whitespace": False, "bos_id": -1},
    ],
)
def test_a_unigram_model_gets_pieces(rules: dict[str, Any], folder: Path) -> None:
    """A model of sentencepiece's own default type."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "more.txt").write_text((folder / "en.txt").read_text() + "Sally sells sea shells by the shore.\n" * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "more.txt"), model_prefix=str(folder / "en"), vocab_size=310, byte_fallback=True,
        hard_vocab_limit=False, num_threads=1, minloglevel=2, **rules,
    )  # fmt: skip
    assert extended(start="en.model") == 0
    before = sentencepiece.SentencePieceProcessor(model_file="en.model")
    after = sentencepiece.SentencePieceProcessor(model_file="new/tokenizer.model")
    fast = AutoTokenizer.from_pretrained("new")
    assert len(fast) == after.get_piece_size() == before.get_piece_size() + 40
    texts = [ENGLISH, "naïve café 12", "今天天气很好，我们散步。", "a 你好 b", "  two  spaces ", "ﬁne ①", "a <sep>b"]
    for text in texts:
        ids = after.encode(text)
        assert fast(text, add_special_tokens=False).input_ids == ids, text
        assert after.decode(ids) == before.decode(before.encode(text)) == fast.decode(ids), text
    assert after.encode(ENGLISH) == before.encode(ENGLISH)
    assert len(after.encode(CHINESE)) < 0.6 * len(before.encode(CHINESE))


def test_a_converted_sentencepiece_model_is_extended_with_the_file_beside_it(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = sentencepiece_model(folder)
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (folder / "llama").mkdir()
    path.rename(folder / "llama" / "tokenizer.model")
    (folder / "llama" / "tokenizer_config.json").write_text(json.dumps(config))
    old = AutoTokenizer.from_pretrained("llama")
    old.save_pretrained("llama")
    assert (folder / "llama" / "tokenizer.json").is_file()
    assert extended(start="llama") == 0
    new = AutoTokenizer.from_pretrained("new")
    assert new(ENGLISH).input_ids == old(ENGLISH).input_ids
    assert len(new(CHINESE).input_ids) < 0.5 * len(old(CHINESE).input_ids)
    assert new.decode(new(CHINESE, add_special_tokens=False).input_ids) == CHINESE
    if (folder / "new" / "tokenizer.model").exists():
        pieces = sentencepiece.SentencePieceProcessor(model_file="new/tokenizer.model")
        assert pieces.get_piece_size() == len(new)


def test_a_job_sees_new_tokens_where_the_model_has_none(folder: Path, tiny_llama: Path) -> None:
    old = AutoTokenizer.from_pretrained("old")
    assert extended() == 0
    old.save_pretrained(tiny_llama)
    job = Job(task="pretrain", model=ModelBlock(name=str(tiny_llama), tokenizer="new"))
    found = extension_of(job, folder)
    assert found is not None and found.first == 376
    (folder / "job.yaml").write_text(f"task: pretrain\nmodel: {{name: {tiny_llama}, tokenizer: new}}\ndata: zh.txt\n")
    assert work_of(load_job(folder / "job.yaml"), base=folder).shape.vocabulary == 448
    AutoTokenizer.from_pretrained("new").save_pretrained(tiny_llama)  # as an export has it
    assert extension_of(job, folder) is None
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file("old/tokenizer.json"))
    other.add_tokens(["another"])
    other.save_pretrained(tiny_llama)
    with pytest.raises(Exception, match="new extends old, not the tokenizer of"):
        extension_of(job, folder)


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_tokenizer_of_bert_s_kind_gets_pieces_and_its_model_rows(folder: Path, tiny_llama: Path) -> None:
    (folder / "ru.txt").write_text("Кочегар кормит печь, и печь греет море.\nПечи греют моря, кочегары кормят.\n" * 40)
    learnt = BertWordPieceTokenizer(lowercase=True)
    learnt.train_from_iterator([ENGLISH] * 9, vocab_size=200, show_progress=False)
    learnt.save_model(".", "bert")
    old = BertTokenizerFast(vocab="bert-vocab.txt")
    old.save_pretrained(tiny_llama)
    assert extended(start=str(tiny_llama), corpus="ru.txt") == 0
    new = AutoTokenizer.from_pretrained("new")
    assert type(new) is type(AutoTokenizer.from_pretrained(tiny_llama)) and len(new) > len(old)
    assert new(ENGLISH).input_ids == old(ENGLISH).input_ids and new.cls_token_id == old.cls_token_id
    assert old("печь греет").input_ids.count(old.unk_token_id) == 2
    assert new.unk_token_id not in new("печь греет море").input_ids
    found = extension_of(Job(task="pretrain", model=ModelBlock(name=str(tiny_llama), tokenizer="new")), folder)
    assert found is not None and (found.first, found.tokens) == (len(old), len(new))
