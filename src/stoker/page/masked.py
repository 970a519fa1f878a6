"""Texts without the passwords and signatures of the URLs in them."""

from __future__ import annotations

import re
from typing import Any

from stoker.node_cache.urls import WEB

_PLACE = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<user>[^\s/'\":@]*)(?P<password>:[^\s/'\"]*)?@")
_QUERY = re.compile(
    r"(?P<key>[?&](?:sig|signature|token|access_token|password|api[_-]?key|policy|key-pair-id|awsaccesskeyid"
    r"|googleaccessid|ossaccesskeyid|x-(?:amz|goog|oss)-[\w-]+)=)[^\s&'\"#,}\]]+",
    re.IGNORECASE,
)


def masked(value: Any) -> Any:
    """The same with ``***`` in its texts for passwords, users of web addresses, and values of signed queries."""
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    if not isinstance(value, str) or ("://" not in value and "=" not in value):
        return value
    return _QUERY.sub(r"\g<key>***", _PLACE.sub(_of_place, value))


def _of_place(match: re.Match[str]) -> str:
    scheme, user, password = match["scheme"], match["user"], match["password"]
    if scheme.lower() in WEB:
        return f"{scheme}://***@"
    return match[0] if password is None else f"{scheme}://{user}:***@"
