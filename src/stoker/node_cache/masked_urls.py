"""Masks passwords and signatures of the URLs in a text."""

from __future__ import annotations

import re

from stoker.node_cache.urls import WEB

# The scheme's length is limited: from every letter of a long word, the search would go on to the word's end.
_PLACE = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]{0,30})://(?P<user>[^\s/'\":@]*)(?P<password>:[^\s/'\"]*)?@")
_QUERY = re.compile(
    r"(?P<key>[?&](?:sig|signature|token|access_token|password|api[_-]?key|policy|key-pair-id|awsaccesskeyid"
    r"|googleaccessid|ossaccesskeyid|x-(?:amz|goog|oss)-[\w-]+)=)[^\s&'\"#,}\]]+",
    re.IGNORECASE,
)


def mask_urls(text: str) -> str:
    """Replaces passwords, users of web addresses, and values of signed queries by ``***``."""
    if "://" not in text and "=" not in text:
        return text
    return _QUERY.sub(r"\g<key>***", _PLACE.sub(_of_place, text))


def _of_place(match: re.Match[str]) -> str:
    scheme, user, password = match["scheme"], match["user"], match["password"]
    if scheme.lower() in WEB:
        return f"{scheme}://***@"
    return match[0] if password is None else f"{scheme}://{user}:***@"
