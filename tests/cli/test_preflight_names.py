"""A run or a model that a command line names and that does not exist is reported before any heavy import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROWS = '{"prompt": "1 + 1?", "expected": "2"}\n'
CODE = "import sys; from stoker.cli.main import main; code = main({words!r}); print(code, 'torch' in sys.modules)"
OF_MODELS = "`stoker eval` evaluates a model with --answers FILE or --tasks NAME"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["chat", "org/none", "--prompt", "Hi"], 1, "org/none is neither here nor in the hub's cache, and http"),
        (["serve", "one=org/none", "--port", "0"], 1, "org/none is neither here nor in the hub's cache, and http"),
        (["eval", "org/none", "--answers", "rows.jsonl"], 1, "org/none is neither here nor in the hub's cache, and"),
        (["eval", "org/none", "rows.jsonl"], 2, f"there is no run org/none; `stoker train` makes one; {OF_MODELS}"),
        (["chat", "none", "--prompt", "Hi"], 2, "there is no run none; `stoker train` makes one"),
        (["export", "none", "--format", "gguf", "--to", "out"], 2, "there is no run none; `stoker train` makes one"),
    ],
)
def test_what_does_not_exist_is_an_error_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(words=words)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{code} False\n", done.stderr
    assert message in done.stderr
