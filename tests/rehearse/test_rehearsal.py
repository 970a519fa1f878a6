"""The undisturbed run that is reused, and the tolerance of the comparison with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from test_run_equality import run_at

from stoker.hardware.process_device import Device
from stoker.job import load_job
from stoker.models.tuning import quantise
from stoker.rehearse import rehearsal as module
from stoker.rehearse.rehearsal import Rehearsal
from stoker.runs.run_folder import RunFolder


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """A rehearsal of a job with a GGUF file, whose runs end at once."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (tmp_path / "base.gguf").write_bytes(b"weights")
    job = {"task": "sft", "model": "base.gguf", "data": "rows.jsonl", "steps": 3, "output": "run"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    made = Rehearsal(load_job(path), str(path), [], base=tmp_path, say=lambda _: None)

    def train(output: Path, *_: object, **__: object) -> tuple[int, str]:
        output.parent.mkdir(exist_ok=True)
        folder = run_at(output)
        for world in (2, 1):
            folder.event("group", world=world)
        folder.event("done", step=3)
        return 0, ""

    monkeypatch.setattr(made, "_train", train)
    return made


def test_a_model_in_a_file_that_was_replaced_is_trained_again(rehearsal: Rehearsal, tmp_path: Path) -> None:
    first = rehearsal.undisturbed().path
    assert rehearsal.undisturbed().path == first
    (tmp_path / "base.gguf").write_bytes(b"other weights")
    assert rehearsal.undisturbed().path != first


def test_the_tolerance_is_of_the_precision_that_the_device_chooses(
    rehearsal: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "choose_device", lambda *_: Device("cpu", "bf16", "it has AMX"))
    calm = rehearsal.undisturbed()
    write = module.write_faults
    monkeypatch.setattr(module, "write_faults", lambda folder, faults: None if not faults else write(folder, faults))
    assert rehearsal.disturbed(RunFolder(calm.path), []).equality.tolerance == 3e-2
    shutil.rmtree(rehearsal.folder / "disturbed")  # it has no lock, so it would not be replaced
    (tmp_path / "job.yaml").write_text((tmp_path / "job.yaml").read_text() + "tune: qlora\n")
    rehearsal._loaded = load_job(tmp_path / "job.yaml")  # a quantised base computes in float32 on a processor
    assert rehearsal.disturbed(RunFolder(calm.path), []).equality.tolerance == 1e-4


def test_its_runs_write_to_no_place_of_the_users(
    rehearsal: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints at `checkpoint.to` would be another run's, and a store would get the rows of a rehearsal."""
    commands: list[list[str]] = []

    def start(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "error: no\n\n")

    monkeypatch.setattr(subprocess, "run", start)
    path = tmp_path / "job.yaml"
    overrides = ["checkpoint.to=shared", "output=mine"]
    made = Rehearsal(load_job(path), str(path), overrides, base=tmp_path, say=lambda _: None)
    assert made._train(tmp_path / "there", ["faults.hang=10"]) == (1, "error: no")
    (command,) = commands
    at = command.index(str(path))
    job = load_job(path, command[at + 1 : command.index("--json")]).job
    assert (job.checkpoint.to, job.output, job.faults.hang) == (None, str(tmp_path / "there"), 10)
    assert "export.sync=null" in command
