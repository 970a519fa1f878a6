"""The record of a job's stages says where the run of each is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.job.stages import read_stages
from stoker.runs.stage_runs import RECORD, read_record, record_of

JOB = """task: sft
model: llama-3m
data: rows.jsonl
output: runs/chain
stages:
  - {name: first}
  - {name: second, model: {from: first}, output: elsewhere/more}
"""


def test_a_stage_with_an_output_of_its_own_is_found_from_the_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    root = tmp_path / "runs/chain"
    root.mkdir(parents=True)
    record = record_of(read_stages("job.yaml", []))
    (root / RECORD).write_text(json.dumps(record))
    assert [stage["folder"] for stage in read_record(root)] == [f"{root}/first", f"{tmp_path}/elsewhere/more"]
    for stage in record:
        del stage["folder"]  # as earlier versions wrote it
    (root / RECORD).write_text(json.dumps(record[:1]))
    assert [stage["folder"] for stage in read_record(root)] == [f"{root}/first"]
