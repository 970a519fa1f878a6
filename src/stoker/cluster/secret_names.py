"""Recognises secrets that should not be shown: by the name of a variable, and by a password within a URL."""

from __future__ import annotations

import re

# Whole parts of a name: HF_TOKEN and secretKey have one; MONKEY, KEYBOARD and TOKENIZERS_PARALLELISM do not.
WORDS = frozenset(
    (
        *("token", "key", "keys", "secret", "secrets", "pass", "password", "passwd", "passphrase"),
        *("credential", "credentials", "apikey", "accesskey", "privatekey", "secretkey"),
    )
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.I)


def is_secret_name(name: str) -> bool:
    """Returns whether the name of a variable or an option suggests a secret value."""
    return not WORDS.isdisjoint(part.lower() for part in _PARTS.findall(name))


def has_password(text: str) -> bool:
    """Returns whether a text contains a URL with a password: ``https://user:password@host``."""
    return _PASSWORD.search(text) is not None
