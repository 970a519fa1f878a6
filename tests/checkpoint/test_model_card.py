"""What an export says of its base, and its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.model_card import public_name
from stoker.job.schema import Job
from stoker.models import offline_models


def job(model: str) -> Job:
    return Job.model_validate({"task": "sft", "model": {"name": model}, "data": [{"path": "rows.jsonl"}], "steps": 1})


def folder_with_config(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_hub_id_is_its_own_name(tmp_path: Path) -> None:
    assert public_name(job("org/name"), tmp_path).name == "org/name"


def test_a_packaged_model_is_named_by_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(offline_models.Packaged, "path", lambda self: file)
    found = public_name(job("smollm2-135m"), tmp_path)
    assert found.name == "HuggingFaceTB/SmolLM2-135M-Instruct" and found.warning is None
    assert "4-bit weights de-quantised" in found.remark


def test_a_folder_of_the_hubs_cache_is_named_by_its_id(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path / "hub" / "models--org--some-name" / "snapshots" / "0a1b")
    assert public_name(job(str(folder)), tmp_path).name == "org/some-name"


@pytest.mark.parametrize(
    ("given", "called"), [("tiny", "./tiny"), ("models/tiny", "./models/tiny"), ("{base}/tiny", "./tiny")]
)
def test_a_local_folder_is_warned_of(given: str, called: str, tmp_path: Path) -> None:
    name = given.format(base=tmp_path)
    folder_with_config(tmp_path / name)
    found: Any = public_name(job(name), tmp_path)
    assert found.name == called and "no hub id" in found.warning and str(tmp_path) not in found.warning
