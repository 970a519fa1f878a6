"""Recognises secrets that should not be shown: by the name of a variable, and by a password or token in a URL."""

from __future__ import annotations

import os
import re
from itertools import pairwise

from stoker.node_cache.masked_urls import mask_urls

# Ends of parts of a name: HF_TOKEN, PGPASSWORD and secretKey have one; TOKENIZERS_PARALLELISM does not.
ENDS = (
    *("token", "secret", "secrets", "password", "passwd", "pwd", "pw", "passphrase", "auth"),
    *("credential", "credentials", "apikey"),
)
# Words before KEY with which it names a part of data; after any other word it is a secret: STORAGE_KEY.
OF_DATA = frozenset(
    ("sort", "cache", "primary", "foreign", "partition", "shard", "group", "join", "index", "row", "column", "public")
)
PATHS = ("file", "path", "dir", "folder", "sock")  # names that end so have a place, such as HF_TOKEN_PATH
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Paths that may exist only where the job runs: in lower case, in a folder such as /mnt or /home, or with a suffix. Keys
# in base 64 may begin with a slash.
_PATH = re.compile(
    r"/(?:[a-z0-9._-]+/)+[a-z0-9._-]*|/[a-z]{3,}/(?:[\w.@-]+/)*[\w.@-]*|/(?:[\w.@-]+/)*[\w.@-]+\.[a-z][a-z0-9]*"
)
_SWITCHES = frozenset(("", "0", "1", "true", "false", "yes", "no", "on", "off"))
_KINDS = frozenset(("none", "simple", "basic", "digest", "kerberos", "ntlm", "oauth", "oauth2", "plain", "sasl", "tls"))

_PASSWORD = re.compile(r"[A-Za-z][\w+.-]{0,30}://[^/\s:@\"]*:[^/\s@\"]+@")  # may have a ', at which a URL ends in logs


def is_secret_name(name: str) -> bool:
    """Returns whether the name of a variable or an option suggests a secret value."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    if not parts or parts[-1] in PATHS:
        return False
    of_key = any(part in ("key", "keys") and before not in OF_DATA for before, part in pairwise(["", *parts]))
    return of_key or "pass" in parts or any(part.endswith(ENDS) for part in parts)


def is_secret(name: str, value: str) -> bool:
    """Returns whether a variable's value is a secret: by its name, or by a URL in it.

    Paths, switches, and kinds of authentication (``KAFKA_AUTH: none``) are none.
    """
    is_path = value.startswith("/") and (os.path.exists(value) or _PATH.fullmatch(value) is not None)  # noqa: PTH110
    word = value.lower()
    is_open = is_path or word in _SWITCHES or (name.lower().endswith("auth") and word in _KINDS)
    return (is_secret_name(name) and not is_open) or has_password(value)


def has_password(text: str) -> bool:
    """Returns whether a text contains a URL with a password, a token in its user's place, or a signature."""
    return _PASSWORD.search(text) is not None or mask_urls(text) != text
