"""What origins say of an object's content, in their various words."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime

import pytest

from stoker.node_cache.object_version import ObjectVersion

MD5 = hashlib.md5(b"x")
B64 = base64.b64encode(MD5.digest()).decode()


@pytest.mark.parametrize(
    ("info", "tag"),
    [
        ({"size": 1, "ETag": '"abc"', "LastModified": datetime(2026, 1, 1, tzinfo=UTC)}, "tag abc"),  # s3
        ({"size": 1, "etag": "CJ/x=", "updated": "2026-01-01"}, "tag CJ/x="),  # gs
        ({"size": 1, "ETag": 'W/"abc"'}, 'W/"abc'),
        ({"size": 1, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, "time Thu, 01 Jan 2026 00:00:00 GMT"),
        ({"size": 1, "mtime": datetime.fromtimestamp(5, UTC)}, "time 5000"),  # hdfs, sftp
        ({"size": 1, "created": 5.0}, "time 5000"),  # memory
        ({"size": 1, "modificationTime": 5}, "time 5000"),  # webhdfs
        ({"size": 1, "modify": "20260101000000"}, "time 20260101000000"),  # ftp
        ({"size": 1}, ""),
    ],
)
def test_tags(info: dict[str, object], tag: str) -> None:
    assert ObjectVersion.of_info(info).tag in (tag, f"tag {tag}")


@pytest.mark.parametrize(
    ("info", "checksum"),
    [
        ({"md5Hash": B64}, f"md5:{MD5.hexdigest()}"),  # gs
        ({"Content-MD5": B64}, f"md5:{MD5.hexdigest()}"),
        ({"Digest": f"MD5={B64}"}, f"md5:{MD5.hexdigest()}"),
        ({"Digest": "adler32=03da0195, sha-256=" + base64.b64encode(bytes(32)).decode()}, f"sha256:{'0' * 64}"),
        ({"Content-MD5": "not base64!"}, ""),
        ({"ETag": f'"{MD5.hexdigest()}"'}, ""),  # it may be anything
    ],
)
def test_checksums(info: dict[str, object], checksum: str) -> None:
    version = ObjectVersion.of_info(info)
    assert version.checksum == checksum
    if checksum.startswith("md5"):
        right, wrong = version.hasher(), version.hasher()
        right.update(b"x")
        wrong.update(b"y")
        assert version.fits(right) and not version.fits(wrong)


def test_what_is_the_same_content() -> None:
    one = ObjectVersion(5, "tag a")
    assert one.same_content(ObjectVersion(5, "tag a", "md5:00")) and not one.same_content(ObjectVersion(5, "tag b"))
    assert not one.same_content(ObjectVersion(6, "tag a"))
    assert one.same_content(ObjectVersion(5, "time 1"))  # of a listing that gives no tags
    assert one.key("u") != ObjectVersion(5, "tag b").key("u") != one.key("v")
    assert ObjectVersion(5, "", "md5:00").key("u") != ObjectVersion(5, "", "md5:01").key("u")
    assert ObjectVersion.of(one.plain()) == one
