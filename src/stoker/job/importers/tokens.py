"""Special tokens in foreign files: added tokens, and tokens that end an answer."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_data import ForeignSource
from stoker.job.key_paths import KeyPath

IN_CONTENT = "new tokens are tokens in the rows' content, too"


def carry_stop(config: ConfigReader, *keys: str | KeyPath) -> None:
    """Carries the tokens at these keys as stop tokens, each once, the first as the end token."""
    found = [(key, config.words(key)) for key in keys if config.value(key) is not None]
    stops = list(dict.fromkeys(token for _, tokens in found for token in tokens))
    if stops:
        config.carry(found[0][0], "model.stop", stops[0] if len(stops) == 1 else stops)
        config.idle("`stop`", *(key for key, _ in found[1:]))


def carry_tokens(config: ConfigReader, *keys: str | KeyPath) -> str | KeyPath | None:
    """Carries the tokens that are added at these keys; returns the first key that adds some."""
    found = [(key, config.words(key)) for key in keys if config.value(key) is not None]
    tokens = list(dict.fromkeys(token for _, words in found for token in words))
    if not tokens:
        return None
    config.carry(found[0][0], "model.special_tokens.additional", tokens)
    config.idle("`special_tokens`", *(key for key, _ in found[1:]))
    return found[0][0]


def keep_in_content(found: ForeignSource, key: str | KeyPath | None) -> None:
    """Tokens that a file adds are written in its rows, where other tools read them as tokens."""
    if key is not None and found.special_tokens is None and found.format not in ("text", "prompt"):
        found.special_tokens, found.keys["special_tokens"] = "keep", key
        found.notes["special_tokens"] = IN_CONTENT
