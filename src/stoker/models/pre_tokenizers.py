"""The splitting rules of byte-level BPE tokenizers, by llama.cpp's names.

A GGUF stores only a name (``tokenizer.ggml.pre``); the regular expressions are compiled into llama.cpp
(``src/llama-vocab.cpp``). transformers ignores the name when it reads a GGUF and splits as GPT-2 does, which gives
wrong tokens for digits and capitals.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
"""The pattern of ByteLevel(use_regex=True)."""

DIGITS = r"\p{N}"
"""The pattern of Digits(individual_digits=True)."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NEWLINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _NEWLINES_AND_SPACES
LLAMA3 = _CL100K % "{1,3}"
QWEN2 = _CL100K % ""
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _NEWLINES_AND_SPACES
)

PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((TEKKEN,), True): "tekken",
}
"""(splitting rules in order, whether a piece that is a token skips the merges) -> ``tokenizer.ggml.pre``."""


def pre_tokenizer_named(name: str) -> tuple[PreTokenizer, bool] | None:
    """Returns the splitting rules of a name, and whether a piece that is a token skips the merges; or None."""
    for (rules, ignore_merges), known in PRE_TOKENIZERS.items():
        if known == name:
            steps = [_step(rule) for rule in rules if rule != GPT2]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in rules)
            return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level, ignore_merges
    return None


def _step(rule: str) -> PreTokenizer:
    if rule == DIGITS:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(rule), behavior="isolated")
