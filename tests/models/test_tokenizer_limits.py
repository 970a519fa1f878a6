"""Tokenizers that would multiply a text are refused; those of known families are not."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stoker.errors import UserError
from stoker.models.tokenizers.tokenizer_limits import check_growth, check_ids

TENFOLD = normalizers.Replace("a", "a" * 10)


def built(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Sequence([TENFOLD] * 12)},
        {"normalizer": normalizers.Sequence([normalizers.Sequence([TENFOLD, normalizers.NFC()]), TENFOLD, TENFOLD])},
        {"normalizer": normalizers.Replace(Regex("."), "a" * 1000)},
        {"normalizer": normalizers.Replace("", "a" * 1000)},
        {"normalizer": normalizers.Prepend("a" * 1000)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 20)},
        {"decoder": decoders.Sequence([decoders.Replace("a", "a" * 10)] * 12)},
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the tokenizer of x can make a text more than 256 times as long"):
        check_growth(built(**parts), "x")


def test_tokenizers_of_known_families_are_not() -> None:
    spaces = normalizers.Replace(" ", "\u2581")
    check_growth(built(normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])), "Llama")
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD()]
    runs = normalizers.Replace(Regex(" {2,}"), " ")
    check_growth(built(normalizer=normalizers.Sequence([*quotes, runs])), "ALBERT")
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    level = pre_tokenizers.ByteLevel(use_regex=False)
    check_growth(built(pre_tokenizer=pre_tokenizers.Sequence([split, level]), decoder=decoders.ByteLevel()), "Qwen")
    check_growth(built(decoder=decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])), "Gemma")


def test_a_token_id_far_above_the_number_of_tokens_is_refused() -> None:
    check_ids(Tokenizer(models.WordLevel({"a": 0, "b": 1_000_000})), "x")
    with pytest.raises(UserError, match="the tokenizer of x has the token id 1,000,000,000, and 2 tokens"):
        check_ids(Tokenizer(models.WordLevel({"a": 0, "b": 1_000_000_000})), "x")
