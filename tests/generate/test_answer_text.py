"""Text as it streams: whole characters only, nothing of a stop string, and the same text in the end."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers import Tokenizer

from families import tiny
from stoker.data.templates.encode import Encoder
from stoker.generate.answer_text import AnswerText, answer_all, stream_answer
from stoker.generate.decoder import decoder_of
from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import Request, Sampling
from stoker.hardware.process_device import Device
from tiny_tokenizer import byte_fallback_tokenizer

TEXTS = (
    "plain words, and more",
    "naïve café — 你好, мир",
    "emoji 👩‍👩‍👧 in a row 🎉🎉",
    "tabs\tand\n\nlines ",
    " a b  c",
)


def engine_for(tokenizer: Tokenizer) -> GenerationEngine:
    model = tiny("llama", vocab_size=tokenizer.get_vocab_size())
    return GenerationEngine(decoder_of(model, Device("cpu", "fp64", ""), context=64))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_hold_whole_characters(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    answer = AnswerText(tokenizer)
    pieces = [*(answer.push(token) for token in ids), answer.finish()]
    assert "".join(pieces) == answer.text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_tokens_begin_where_their_text_says(tokenizer: Tokenizer) -> None:
    definition = json.loads(tokenizer.to_str())  # with a token that is a space and a part of a character, as in SmolLM2
    definition["model"]["vocab"]["Ġð"] = 1000
    definition["model"]["merges"].insert(0, ["Ġ", "ð"])
    encoder = Encoder(json.dumps(definition))
    text = "Hé 🙂 x 🎉🎉"
    answer, places = AnswerText(encoder.tokenizer), []
    for token in encoder.encode_beginning(text):
        places.append(answer.decoded)
        answer.push(token)
    assert places == encoder.beginning_places(text) and answer.decoded == len(text)


def test_an_incomplete_character_at_the_end_is_given_as_it_decodes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🎉", add_special_tokens=False).ids[:-1]
    answer = AnswerText(tokenizer)
    pieces = [*(answer.push(token) for token in ids), answer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("▁a <0xC3> <0xA9> <0xFF> ▁b a", "aé\ufffd\ufffd ba"),  # the byte makes the two before it invalid as well
        ("▁a <0xC3> <0xA9> <0xFF> b <0xC3> <0xA9> ▁b", "aé\ufffd\ufffdbé b"),
        ("▁a <0xC3> <0xA9> <0xFF>", "aé\ufffd\ufffd"),
    ],
)
def test_an_invalid_byte_does_not_end_the_answer(tokens: str, text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    answer = AnswerText(tokenizer)
    pieces = [*(answer.push(tokenizer.token_to_id(token)) for token in tokens.split()), answer.finish()]
    assert "".join(pieces) == answer.text == text
    assert answer.decoded <= len(text)


@pytest.mark.parametrize("stop", [["more"], ["and mo", "xyz"], [" "], ["ore", "words"], ["never"], ["and more!"]])
def test_no_part_of_a_stop_string_is_ever_given(stop: list[str], tokenizer: Tokenizer) -> None:
    text = TEXTS[0]
    expected = text[: min((text.find(s) for s in stop if s in text), default=len(text))]
    answer = AnswerText(tokenizer, stop)
    given = ""
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        given += answer.push(token)
        assert expected.startswith(given)
    assert given + answer.finish() == expected
    assert answer.stopped == (expected != text)


def test_streamed_and_batched_answers_are_the_same(tokenizer: Tokenizer) -> None:
    engine = GenerationEngine(
        decoder_of(tiny("llama", vocab_size=tokenizer.get_vocab_size()), Device("cpu", "fp64", ""), context=64)
    )
    requests = [Request((5, 6, n), 20, Sampling(temperature=1.0, seed=n)) for n in range(7, 11)]
    free = answer_all(engine, tokenizer, requests)
    texts = [tokenizer.decode(answer.generation.ids) for answer in free]
    assert [answer.text for answer in free] == texts and {answer.finish for answer in free} == {"length"}
    stop = next(text[3:5] for text in texts if len(text) > 6)
    streamed = ["".join(stream_answer(engine, tokenizer, request, [stop])) for request in requests]
    batched = answer_all(engine, tokenizer, requests, [stop])
    assert streamed == [answer.text for answer in batched] == [text.split(stop)[0] for text in texts]
    assert "stop" in {answer.finish for answer in batched}
    assert all(len(a.generation.tokens) < 20 for a in batched if a.finish == "stop")  # ended where the string was found


def test_a_stream_that_is_closed_lets_the_engine_go(tokenizer: Tokenizer) -> None:
    engine = GenerationEngine(
        decoder_of(tiny("llama", vocab_size=tokenizer.get_vocab_size()), Device("cpu", "fp64", ""), context=64)
    )
    pieces = stream_answer(engine, tokenizer, Request((5, 6), 40, Sampling(temperature=1.0)))
    list(itertools.islice(pieces, 1))
    pieces.close()  # type: ignore[attr-defined]
    assert engine.run([Request((5, 6), 3)])[0].ended == "length"
    assert not engine.busy
