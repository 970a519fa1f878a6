"""Encoding word by word against the tokenizer itself, for the tokenizers of several families."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from stoker.data.templates.encode import Encoded, Encoder
from stoker.errors import UserError

LEARNT_FROM = [
    "The quick brown fox jumps over 1234 lazy dogs, isn't it?  Two  spaces. x = {\n    y: 2\n}\n\n\n### End",
    "Größe naïve e\u0301 日本語の文 👩\u200d👧 it's I'LL   tab\there\r\nnew \u00a0line assistant\nHello",
] * 6


def built(pre: Any, normalizer: Any = None, post: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LEARNT_FROM, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im|>"])
    tokenizer.add_tokens(["<think>"])
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


def byte_level(pattern: str | None = None) -> Any:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def metaspace() -> Tokenizer:
    """Like the tokenizers that come from SentencePiece: spaces are letters, nothing is parted."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(LEARNT_FROM, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
PATTERNS = (  # GPT-2, cl100k and Llama 3, Qwen 2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    _LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
    _LETTERS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
)
FAMILIES = {
    "gpt2": built(byte_level(), post=processors.ByteLevel(trim_offsets=True)),
    "smollm2": built(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])),
    "nfc": built(byte_level(PATTERNS[1]), normalizers.NFC()),
    "metaspace": metaspace(),
} | {f"pattern {i}": built(byte_level(pattern)) for i, pattern in enumerate(PATTERNS)}
WORDS = [
    *(" ", "  ", "   ", "\n", "\n\n", " \n ", "\t", "\r\n", "\u00a0", "\u2003", "\u0301", "\x1c", "\x85"),
    *(
        "fox",
        "'s",
        "'LL",
        "12",
        "3",
        "日本",
        "👩",
        "é",
        ".",
        "...",
        "={",
        "<|im_start|>",
        "<|im_end|>",
        "<|im|>",
    ),
    *("<think>", "<|im", "assistant", "Hello", "ß", "\u200d", "\u180e", "a\u0308"),
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=14).map("".join)


def wanted(tokenizer: Tokenizer, text: str, places: list[int]) -> Encoded:
    """The encoding from the offsets of all tokens, which the tokenizer does not trim where it has no post-processor."""
    bare = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None}))
    encoding = bare.encode(text, add_special_tokens=False)
    found = []
    for place in places:
        begun = sum(start < place for start, _ in encoding.offsets)
        found.append((begun, any(start < place < end for start, end in encoding.offsets)))
    return encoding.ids, found


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), data=st.data())
def test_ids_and_places_are_those_of_the_tokenizer(family: str, texts: list[str], data: st.DataObject) -> None:
    encoder = ENCODERS[family]
    places = [sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))) for text in texts]
    found = encoder.encode(texts, places)
    assert found == [wanted(FAMILIES[family], text, at) for text, at in zip(texts, places, strict=True)]


ENCODERS = {name: Encoder(tokenizer.to_str()) for name, tokenizer in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_get_what_the_tokenizer_puts_around_them(family: str) -> None:
    tokenizer, encoder = FAMILIES[family], Encoder(FAMILIES[family].to_str())
    texts = [*LEARNT_FROM[:2], "", "a", "日本語" * 200]
    assert encoder.encode_documents(texts) == [tokenizer.encode(text).ids for text in texts]


def test_places_beside_a_token_that_strips_white_space() -> None:
    tokenizer = built(byte_level())
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    encoder = Encoder(tokenizer.to_str())
    assert encoder.encode(["a  <mask> b"], [[2]]) == [wanted(tokenizer, "a  <mask> b", [2])]


@example("a b")
@given(TEXTS)
def test_a_text_gives_the_same_ids_alone_and_in_a_batch(text: str) -> None:
    encoder = ENCODERS["gpt2"]
    assert encoder.encode([text, "x", text], [(), (), ()])[2] == encoder.encode([text], [()])[0]


def framed(first: str, last: str = "") -> Tokenizer:
    """A byte-level tokenizer that puts tokens around a document."""
    tokenizer = built(byte_level())
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")]
    template = processors.TemplateProcessing(f"{first} $A {last}".strip(), None, ids)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "before"),
    [
        (FAMILIES["gpt2"], []),
        (FAMILIES["metaspace"], [1]),
        (framed("<|im_start|>"), ["<|im_start|>"]),
        (framed("<|im_start|>", "<|im_end|>"), ["<|im_start|>"]),
        (framed("", "<|im_end|>"), []),
    ],
    ids=["none", "first, metaspace", "first", "first and last", "last"],
)
def test_a_beginning_has_what_comes_before_a_document_and_not_what_ends_it(
    tokenizer: Tokenizer, before: list[Any]
) -> None:
    ids = [tokenizer.token_to_id(token) if isinstance(token, str) else token for token in before]
    encoder = Encoder(tokenizer.to_str())
    for text in ("The fox", " x\n", "<|im_end|>", ""):
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        assert encoder.encode_beginning(text) == [*ids, *plain]
        assert encoder.encode_documents([text])[0][: len(ids) + len(plain)] == [*ids, *plain]


def test_a_pattern_that_takes_too_long_is_an_error_of_the_tokenizer() -> None:
    costly = Encoder(built(pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")).to_str())
    encodings = (costly.encode_one, costly.beginning_places, lambda text: costly.encode([text], [[]]))
    for encode in (*encodings, lambda text: costly.encode_documents([text])):
        with pytest.raises(UserError, match=r"the tokenizer fails on a text: .*retry-limit"):
            encode("x" * 60)
