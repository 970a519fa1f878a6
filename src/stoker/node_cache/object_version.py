"""The version of an object at its origin: its size and tag, and a checksum if the origin reports one."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Self

TAGS = ("ETag", "etag", "md5Hash", "crc32c")
TIMES = (
    "Last-Modified",
    "LastModified",
    "mtime",
    "updated",
    "modified",
    "last_modified",
    "modificationTime",
    "modify",
    "created",
)
DIGESTS = {"md5": "md5", "sha-256": "sha256", "sha-512": "sha512"}  # of the HTTP header Digest, and hashlib's name


@dataclass(frozen=True)
class ObjectVersion:
    """One version of an object's content.

    Attributes:
        size: bytes; None if the origin does not report it.
        tag: changes with the content: ``tag`` and the origin's entity tag, else ``time`` and its modification time;
            empty if the origin reports neither.
        checksum: ``md5:9e107d...``; empty if the origin reports none.
    """

    size: int | None
    tag: str = ""
    checksum: str = ""

    @classmethod
    def of_info(cls, info: Mapping[str, Any]) -> Self:
        """Builds a version from fsspec's info of an object."""
        size = info.get("size")
        kinds = {**dict.fromkeys(TAGS, "tag"), **dict.fromkeys(TIMES, "time")}
        tag = next((f"{kind} {_plain(info[name])}" for name, kind in kinds.items() if info.get(name)), "")
        return cls(None if size is None else int(size), tag, _checksum(info))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Restores a version from the output of `plain`."""
        size = values["size"]
        return cls(None if size is None else int(size), str(values["tag"]), str(values["checksum"]))

    def plain(self) -> dict[str, Any]:
        """Returns its fields for JSON."""
        return asdict(self)

    def same_content(self, other: ObjectVersion) -> bool:
        """Returns whether the content is unchanged. A listing may report less than the object itself."""
        comparable = self.tag.partition(" ")[0] == other.tag.partition(" ")[0]
        return self.size == other.size and (self.tag == other.tag or not comparable)

    def key(self, url: str) -> str:
        """Returns the name of this content of a URL in the cache."""
        return hashlib.blake2b(f"{url}\0{self.size}\0{self.tag or self.checksum}".encode(), digest_size=16).hexdigest()

    def hasher(self) -> Any:
        """Returns a hash object for the checksum; None without a checksum."""
        return hashlib.new(self.checksum.partition(":")[0], usedforsecurity=False) if self.checksum else None

    def fits(self, hasher: Any) -> bool:
        """Returns whether a hash over all bytes equals the checksum."""
        return hasher is None or hasher.hexdigest() == self.checksum.partition(":")[2]


def _plain(value: object) -> str:
    """Normalises a tag: without quotation marks; times in milliseconds, whatever their type."""
    if isinstance(value, datetime):
        value = value.timestamp()
    if isinstance(value, int | float):
        return f"{1000 * value:.0f}"
    return str(value).strip().strip('"')


def _checksum(info: Mapping[str, Any]) -> str:
    """Returns the checksum that an origin declares for the whole object; an entity tag may be anything."""
    if found := _hex(info.get("md5Hash") or info.get("Content-MD5")):
        return f"md5:{found}"
    for part in str(info.get("Digest", "")).split(","):
        name, _, value = part.strip().partition("=")
        if (kind := DIGESTS.get(name.lower())) and (found := _hex(value)):
            return f"{kind}:{found}"
    return ""


def _hex(value: object) -> str:
    try:
        return base64.b64decode(str(value), validate=True).hex() if value else ""
    except (binascii.Error, ValueError):
        return ""
