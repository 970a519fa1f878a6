"""The file with a server's token: only its owner may be able to read it, for `stoker serve` and `stoker ui` alike."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.cli.main import main
from stoker.cli.options.token_file import read_token
from stoker.errors import UserError

TOKEN = "a-token-of-some-length"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_that_others_can_read_is_refused(mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    for words in (["serve", "run", "--token-file", str(path)], ["ui", "--token", str(path)]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"{words[-2]} {path} can be read by others than its owner" in said and f"chmod 600 {path}" in said


def test_a_mounted_secret_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o444)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NOSUID))
    assert read_token(path, "--token") == TOKEN


def test_a_private_token_is_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert read_token(path, "--token") == TOKEN
    path.write_text("short")
    with pytest.raises(UserError, match="at least 16 printable ASCII characters"):
        read_token(path, "--token")
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(UserError, match="cannot be read"):
        read_token(path, "--token")
