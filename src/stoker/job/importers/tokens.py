"""Special tokens in foreign files: added tokens, and tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_data import ForeignSource
from stoker.job.keys.key_paths import KeyPath

IN_CONTENT = "new tokens are tokens in the rows' content, too"


def carry_stop(config: ConfigReader, *keys: str | KeyPath) -> None:
    """Carries the tokens at these keys as stop tokens, each once, the first as the end token."""
    _carry_all(config, keys, "model.stop", "`stop`")


def carry_tokens(config: ConfigReader, *keys: str | KeyPath) -> str | KeyPath | None:
    """Carries the tokens that are added at these keys; returns the first key that adds some."""
    return _carry_all(config, keys, "model.special_tokens.additional", "`special_tokens`")


def _carry_all(config: ConfigReader, keys: Sequence[str | KeyPath], target: str, why: str) -> str | KeyPath | None:
    """Carries the tokens at all keys; returns the key that they are carried from, if there are any."""
    found = [(key, config.words(key)) for key in keys if config.value(key) is not None]
    tokens = list(dict.fromkeys(token for _, words in found for token in words))
    if not tokens:
        return None
    first = found[0][0]
    config.carry(first, target, tokens[0] if target == "model.stop" and len(tokens) == 1 else tokens)
    config.idle(why, *(key for key, _ in found[1:]))
    return first


def keep_in_content(found: ForeignSource, key: str | KeyPath | None) -> None:
    """Tokens that a file adds are written in its rows, where other tools read them as tokens."""
    if key is not None and found.special_tokens is None and found.format not in ("text", "prompt"):
        found.special_tokens, found.keys["special_tokens"] = "keep", key
        found.notes["special_tokens"] = IN_CONTENT
