"""Which tokenizers merge inside of words only, so that a text's tokens are those of its words."""

from __future__ import annotations

from typing import Any

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
PATTERNS = frozenset(
    {
        # GPT-2, cl100k and Llama 3, Qwen 2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        _LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
        _LETTERS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
    }
)


def cuts_at_words(definition: dict[str, Any]) -> bool:
    """Whether a tokenizer, given as the content of its ``tokenizer.json``, is of the kind described above."""
    model, normalizer = definition["model"], definition.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    added = definition.get("added_tokens") or []
    if any(token.get(name) for token in added for name in ("lstrip", "rstrip", "single_word")):
        return False
    kinds = {bool(token.get("normalized")) for token in added}
    contents = [token["content"] for token in added]
    # The two kinds are looked for one after the other; where none holds another, that is as good as at once.
    if len(kinds) == 2 and any(a != b and a in b for a in contents for b in contents):
        return False
    before = definition.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    # Without a pattern a whole text is one word.
    cuts = any(
        step.get("type") == "Split" or step.get("use_regex", True) for step in steps if step.get("type") != "Digits"
    )
    return cuts and steps[-1].get("type") == "ByteLevel" and all(map(_keeps_words, steps))


def _keeps_words(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "ByteLevel":
        return not step.get("add_prefix_space")
    if kind == "Split":
        pattern = step.get("pattern", {}).get("Regex")
        return pattern in PATTERNS and step.get("behavior") == "Isolated" and not step.get("invert")
    return kind == "Digits"
