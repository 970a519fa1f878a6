"""Sentencepiece vocabularies in GGUF files, through llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from families import tiny
from gguf_of_folder import gguf_of_folder
from stoker.checkpoint.export.gguf_replay import ask_llamacpp
from stoker.checkpoint.export.gguf_vocabulary import SPACED, comparable, space_prefix, with_pieces
from stoker.checkpoint.export.replay import ReplayRequest
from stoker.cli.main import main
from stoker.errors import UserError
from stoker.models.gguf_model import tokenizer_of_gguf

SPECIAL = ("<unk>", "<s>", "</s>")
TEXTS = [
    "Hello, world!",
    "the quick brown fox and the quick quick fox",
    " leading and  double   blanks ",
    "\n\n\r\n\ttabs\t\tand\n lines\n",
    "Größe naïve cafe\u0301 你好，世界 🙂👩‍👩‍👧 \u200b\u00a0x",
    "<s>[INST] the fox [/INST] quick</s><s>[INST]the [/INST]",
    "</s> the<tool>fox</s>",
    "<s>",
    "fox \x00\x7f",
]
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TURNS = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
BOS = "<s>{{ messages[0]['content'] }}"
RULES: dict[str, tuple[Any, Any]] = {
    "each": (PREPENDED, None),  # Mistral
    "never": (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),  # Gemma
    "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),  # Llama 2, legacy
    "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),  # Llama 2
}


def sentencepiece_tokenizer(rules: str) -> Tokenizer:
    """A BPE with byte fallback, whose merges are all pairs that make a piece, in the order of the pieces."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = PREPENDED
    trainer = trainers.BpeTrainer(vocab_size=100, max_token_length=5, show_progress=False)
    trained.train_from_iterator(
        [
            "the quick brown fox doesn't mind then there other mother he her th eth ther",
            "a  b   c  d",
            "  the quick dog",
        ]
        * 4,
        trainer,
    )
    learnt = sorted(trained.get_vocab(), key=lambda token: trained.get_vocab()[token])
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    known = set(learnt)
    pairs = [(token[:cut], token[cut:]) for token in learnt for cut in range(1, len(token))]
    merges = [pair for pair in pairs if known.issuperset(pair)]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = RULES[rules]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("▁▁", normalized=False)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Path:
    """Writes a tiny Llama with a tokenizer."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(fast) + 3, **shape)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("rules", "template", "adds"),
    [
        ("each", None, True),
        ("never", None, False),
        ("always", None, True),
        ("first", None, True),
        ("first", BOS, False),
        ("first", BOS.removeprefix("<s>"), False),
    ],
)
def test_llamacpp_encodes_as_a_sentencepiece_tokenizer(
    rules: str, template: str | None, adds: bool, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    tokenizer, file = sentencepiece_tokenizer(rules), tmp_path / "model.gguf"
    gguf_of_folder(save(tmp_path / "model", tokenizer, template), file)
    assert gguf.GGUFReader(file).fields["tokenizer.ggml.add_space_prefix"].contents() == adds
    if template is not None:
        exported = gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents()
        assert exported == (template if template == BOS else SPACED + template)
    prefix = space_prefix(json.loads(tokenizer.to_str()))
    texts = ask_llamacpp(file, ReplayRequest((), (), TEXTS)).texts
    read = AutoTokenizer.from_pretrained(tokenizer_of_gguf(file))
    assert [read(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == texts
    assert read.decode(read("a  b")["input_ids"], skip_special_tokens=True) == "a  b"
    equal = [text for text, ids in zip(TEXTS, texts, strict=True) if ids == tokenizer.encode(text).ids]
    alike = [text for text in TEXTS if comparable(text, prefix, adds_space=adds, special=SPECIAL)]
    assert "▁▁" in tokenizer.encode("fox  5").tokens  # a token that is both added and merged, as Gemma's are
    # llama.cpp also puts a space after a special token, where `always` has one already and `first` puts none.
    after = {"always": TEXTS[6:7], "first": TEXTS[5:7] if adds else []}.get(prefix, [])
    assert equal == [text for text in alike if text not in after]


def test_runs_of_one_character_may_be_interleaved() -> None:
    """As those of Gemma, whose runs of blanks have equal scores; longer ones have priority."""
    runs = ["▁", "▁▁", "▁▁▁", "\n", "\n\n", "\n\n\n"]
    merges = [("▁▁", "▁"), ("\n\n", "\n"), ("▁", "▁▁"), ("\n", "\n\n"), ("▁", "▁"), ("\n", "\n")]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *runs]
    _, scores = with_pieces({"merges": merges, "unk_token": None}, tokens, [gguf.TokenType.NORMAL] * len(tokens))
    assert scores[-6:] == (0.0, -2.0, 0.0, 0.0, -3.0, -1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "template"),
    [("never", TURNS), ("each", TURNS), ("first", "<s>" + TURNS), ("first", TURNS), ("always", TURNS)],
)
def test_a_run_of_gemma_3_is_exported(
    rules: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "base", sentencepiece_tokenizer(rules), template)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    shape = {"num_hidden_layers": 6, "layer_types": kinds, "hidden_size": 64, "vocab_size": 400}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tiny("gemma3_text", dtype=torch.float32, **shape, **ends).save_pretrained("base")
    rows = [{"prompt": f"the fox {i}?", "completion": f"quick brown  fox {i}\n🙂"} for i in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = "task: sft\nmodel: base\ndata: rows.jsonl\nsteps: 2\ntune: lora\nevaluate: {fraction: 0.2}\n"
    Path("job.yaml").write_text(job + "train: {batch: 2, seq_len: 64, precision: fp32}\noutput: run\n")
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    assert main(["export", "run", "--format", "gguf", "--dtype", "q5_1", "--to", "out"]) == 0
    said = capsys.readouterr().out
    assert "through llama.cpp" in said and "tokens and template equal" in said


def test_blanks_after_special_tokens_are_skipped_as_in_phi_3(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    tokenizer, file = sentencepiece_tokenizer("each"), tmp_path / "model.gguf"
    description = json.loads(tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False), AddedToken("<|end|>", rstrip=True)])
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    tokenizer = Tokenizer.from_str(json.dumps(description))
    gguf_of_folder(save(tmp_path / "model", tokenizer), file)
    assert "Phi-3" in gguf.GGUFReader(file).fields["general.name"].contents()
    texts = ["<|end|>\n the fox", "<s> the<|end|> <|end|>x", "<|endoftext|> the fox"]
    answers = ask_llamacpp(file, ReplayRequest((), (), texts))
    assert answers.texts == [tokenizer.encode(text).ids for text in texts]


def interleave(description: dict[str, Any]) -> None:
    """Moves a merge of a token with several to the end."""
    merges = description["model"]["merges"]
    made = ["".join(merge) for merge in merges]
    merges.append(merges.pop(next(i for i, token in enumerate(made) if made.count(token) > 1 and len(set(token)) > 1)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (interleave, "not in the order"),
        (lambda t: t["model"]["merges"].pop(), "are no merge"),
        (lambda t: t["model"].update(ignore_merges=True), "ignore_merges"),
        (lambda t: t["model"]["vocab"].update({"byte": t["model"]["vocab"].pop("<0x41>")}), "not a token for each"),
        (lambda t: t["pre_tokenizer"].update(split=True), "otherwise than sentencepiece"),
        (lambda t: t.update(normalizer={"type": "NFKC"}), "otherwise than sentencepiece"),
    ],
)
def test_refuses_what_llamacpp_would_encode_otherwise(change: Any, reason: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", sentencepiece_tokenizer("first"))
    description = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(description)
    (folder / "tokenizer.json").write_text(json.dumps(description), "utf-8")
    with pytest.raises(UserError, match=reason):
        gguf_of_folder(folder, tmp_path / "model.gguf")
