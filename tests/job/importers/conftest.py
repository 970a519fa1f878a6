"""Each import reads from a folder of its own, with LLaMA-Factory's register of data sets in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign import REGISTER


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(REGISTER))
    return tmp_path
