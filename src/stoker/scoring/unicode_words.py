"""Words of any script, for ROUGE: rouge-score's own tokenizer keeps only a to z and 0 to 9."""

from __future__ import annotations

import regex

# Scripts that put no space between words: each of their characters is a token, with its marks.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(rf"[{_UNSPACED}]\p{{M}}*|(?:(?![{_UNSPACED}])[\p{{L}}\p{{M}}\p{{N}}])+")


class UnicodeWords:
    """A tokenizer for `RougeScorer`; on ASCII text it equals the default one."""

    def tokenize(self, text: str) -> list[str]:
        """Returns the words of a text in lower case."""
        return _WORD.findall(text.lower())
