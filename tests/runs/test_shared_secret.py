"""The secret that nodes share: raw or hexadecimal, long enough, and readable by its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.runs.shared_secret import LEAST, MOST, read_secret

SECRET = bytes(range(100, 100 + LEAST))


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content", [SECRET, SECRET + b"\n", SECRET.hex().encode(), b" " + SECRET.hex().encode() + b"\r\n"]
)
def test_raw_and_hexadecimal_secrets_are_read(tmp_path: Path, content: bytes) -> None:
    assert read_secret(written(tmp_path / "secret", content)) == SECRET


@pytest.mark.parametrize("content", [SECRET[1:], SECRET[1:] + b"\n", SECRET[1:].hex().encode(), b""])
def test_a_short_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=f"and at least {LEAST} are needed"):
        read_secret(written(tmp_path / "secret", content))


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="can be read by others than its owner; write `chmod 600"):
        read_secret(written(tmp_path / "secret", SECRET, mode))


def test_a_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "secret", SECRET)
    if path.stat().st_uid:
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    else:  # root, whose own files all users trust
        os.chown(path, 12345, 12345)
    with pytest.raises(UserError, match="can be read by others"):
        read_secret(path)


def test_what_is_no_short_file_is_refused(tmp_path: Path) -> None:
    assert len(read_secret(written(tmp_path / "secret", b"~" * MOST))) == MOST
    with pytest.raises(UserError, match=f"is longer than {MOST} bytes"):
        read_secret(written(tmp_path / "secret", b"~" * (MOST + 1)))
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "none", "."):
        with pytest.raises(UserError, match="cannot be read"):
            read_secret(tmp_path / name)
