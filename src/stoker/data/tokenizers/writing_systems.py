"""The scripts of texts, and those that a tokenizer splits into too many tokens."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache

import numpy as np

SHARE = 0.1  # of a corpus's letters: a script with a smaller share is in quotations only
POORLY = 0.5  # tokens a letter from which a script is poorly known; English has about 0.25 in English tokenizers
# Marks that only texts in Chinese, Japanese and Korean have: their own punctuation, and the wide forms.
_WIDE = ((0x3000, 0x303F), (0xFE30, 0xFE4F), (0xFF00, 0xFFEF))


@lru_cache(maxsize=1 << 16)
def script_of(character: str) -> str:
    """Returns a letter's script, the first word of its Unicode name (``latin``, ``cjk``); "" for common characters."""
    code = ord(character)
    if any(first <= code <= last for first, last in _WIDE):
        return "cjk"
    if unicodedata.category(character)[0] not in "LM":
        return ""
    name = unicodedata.name(character, "").split(" ", maxsplit=1)[0].split("-", maxsplit=1)[0]
    return "" if name in ("MODIFIER", "COMBINING", "VARIATION") else name.lower()


def codes_of(text: str) -> np.ndarray:
    """Returns the code points of a text, shape (characters,)."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)


def are_letters(codes: np.ndarray, scripts: frozenset[str]) -> np.ndarray:
    """Returns a mask of the code points that are letters of these scripts, of the same shape."""
    different, places = np.unique(codes, return_inverse=True)
    return np.array([script_of(chr(code)) in scripts for code in different.tolist()], dtype=bool)[places]


def to_learn(letters: Counter[str], tokens: Counter[str]) -> frozenset[str]:
    """Returns the scripts that new tokens are learnt for, so that texts in all others keep their tokens.

    These are scripts with at least a tenth of the corpus's letters and more than one token for two letters; if the
    tokenizer encodes all of them well, the most frequent one.

    Args:
        letters: letters of the corpus, by script.
        tokens: tokens that begin at a letter, by its script.
    """
    total = sum(letters.values())
    present = [script for script, count in letters.most_common() if count >= SHARE * total]
    poorly = [script for script in present if tokens[script] > POORLY * letters[script]]
    return frozenset(poorly or present[:1])
