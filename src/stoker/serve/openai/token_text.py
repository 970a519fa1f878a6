"""Text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import json
import math
from functools import lru_cache

from stoker.data.text_codec import TextCodec
from stoker.data.tokenizers.token_bytes import bytes_of, kind_of

LEAST = -9999.0  # log-probability of an impossible token, as in OpenAI's API


def clamp_log_probability(log_probability: float) -> float:
    """Clamps a log-probability to a value that JSON can hold."""
    return LEAST if math.isnan(log_probability) else max(LEAST, log_probability)


class TokenTexts:
    """The bytes of each token of a vocabulary."""

    def __init__(self, codec: TextCodec) -> None:
        definition = json.loads(codec.definition)
        self._tokenizer = codec.tokenizer
        self._kind = kind_of(definition)
        self._added = {token["id"]: token["content"] for token in definition.get("added_tokens") or ()}
        self.bytes = lru_cache(maxsize=65_536)(self._bytes)

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:  # the model has more rows than the tokenizer has tokens
            return b""
        if self._kind is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return bytes_of(written, self._kind)

    def text(self, token: int) -> str:
        """Returns a token as text; part of a character is written as ``bytes:\\xe2\\x80``."""
        held = self.bytes(token)
        try:
            return held.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in held)
