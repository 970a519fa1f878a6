"""Special tokens that are written in content: found, counted, and encoded as text.

A chat template puts content and control tokens into one text. The special tokens that come from content are found by
rendering a second time with a mark inside each of them. The text is then encoded by a copy of the tokenizer whose
special tokens are renamed: the template's are written under the new names, the content's stay text. Both forms have
the same length, so positions in the text are unchanged.

Some tokenizers have role markers that are added but not special (``<｜User｜>``). Those that the chat template writes
around turns count as special here. Marks of reasoning (``<think>``) never do: answers contain them.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.data.templates.chat_template import ChatTemplate
    from stoker.data.templates.encode import Encoder

MARK = "\ufdd0"  # a noncharacter: it is in no text
FIRST_NAME = 0xF0000  # the other names are private-use characters, which are rare in texts
_NAMES = re.compile("[\U000f0000-\U0010fffd]")
_MARKER = re.compile(r"(?!.*(think|reason))[<\[]\S*\w\S*[>\]]", re.IGNORECASE)


class Inseparable(Exception):
    """Raised if a rendered text does not show which of its special tokens come from content."""


class SpecialText:
    """The special tokens of a tokenizer."""

    def __init__(self, definition: str, template: ChatTemplate | None = None) -> None:
        """
        Args:
            definition: content of ``tokenizer.json``.
            template: the chat template whose role markers count as special tokens.
        """
        self._definition = definition
        added = [token for token in json.loads(definition).get("added_tokens") or [] if token["content"]]
        tokens = [str(token["content"]) for token in added if token.get("special")]
        markers = {str(token["content"]) for token in added if _MARKER.fullmatch(token["content"])}.difference(tokens)
        written = template.render_placeholders() if markers and template is not None else ""
        tokens += sorted(marker for marker in markers if marker in written)
        self._names = {token: chr(FIRST_NAME + i) * len(token) for i, token in enumerate(tokens)}
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first)) if tokens else None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that the rendering process needs, without the encoder."""
        return {"_names": self._names, "_pattern": self._pattern}

    def count(self, value: Any) -> int:
        """Counts special tokens in all strings of a value: a string, or lists and objects of them."""
        if self._pattern is None:
            return 0
        if isinstance(value, str):
            return len(self._pattern.findall(value))
        if isinstance(value, dict):
            return sum(self.count(key) + self.count(item) for key, item in value.items())
        return sum(map(self.count, value)) if isinstance(value, list | tuple) else 0

    def mark(self, value: Any) -> Any:
        """Returns the value with a mark behind the first character of each special token."""
        if isinstance(value, str):
            assert self._pattern is not None
            return self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return list(map(self.mark, value)) if isinstance(value, list | tuple) else value

    def separate(self, text: str, marked: str) -> str:
        """Writes a rendered text for `encoder`: special tokens that do not come from content are renamed.

        Args:
            marked: the same conversation rendered with marked content.

        Raises:
            Inseparable: the marks changed the rendering, or the text contains characters of the new names.
        """
        assert self._pattern is not None
        if marked.replace(MARK, "") != text or _NAMES.search(text):
            raise Inseparable
        starts, at = set(), 0
        for part in marked.split(MARK)[:-1]:
            at += len(part)
            starts.add(at - 1)
        return self._pattern.sub(lambda found: found[0] if found.start() in starts else self._names[found[0]], text)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder whose special tokens are renamed; they keep their ids."""
        from stoker.data.templates.encode import Encoder

        content = json.loads(self._definition)
        model, names = content["model"], self._names
        for token in content["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False}
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        if model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if not names.keys() & _made_of(merge)]
        return Encoder(json.dumps(content))


def _made_of(merge: str | list[str]) -> set[str]:
    """Returns the tokens that a merge needs, and the one that it makes."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}
