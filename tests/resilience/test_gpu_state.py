"""Counters of NVIDIA's driver, as `nvidia-smi` prints them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.resilience import gpu_state as module
from stoker.resilience.gpu_state import GpuState, gpu_state

SMI = """#!/bin/sh
echo "$1" >> {folder}/asked
case "$2" in
    *ecc*) echo "{errors}";;
    *remapped*) echo "{rows}";;
    *) {slowdown};;
esac
"""


@pytest.fixture(autouse=True)
def first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")


def answers(folder: Path, script: str) -> GpuState:
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
    return gpu_state("0000:1b:00")


@pytest.mark.parametrize(
    ("errors", "rows", "failed", "notes"),
    [
        ("0", "No, No", False, []),
        ("2", "Yes, No", False, ["2 uncorrectable memory errors", "remapped at its next reset"]),
        ("0", "1, 0", False, ["remapped at its next reset"]),
        ("0", "No, Yes", True, []),
        ("[N/A]", "[N/A], [N/A]", False, []),  # under MIG, and without ECC
        ("[GPU requires reset]", "[Unknown Error]", False, []),
        ("", "", False, []),
    ],
)
def test_memory(tmp_path: Path, errors: str, rows: str, failed: bool, notes: list[str]) -> None:
    state = answers(tmp_path, SMI.format(folder=tmp_path, errors=errors, rows=rows, slowdown="echo Not Active"))
    assert bool(state.failed) is failed and not state.throttled
    assert len(state.notes) == len(notes) and all(note in own for note, own in zip(notes, state.notes, strict=True))
    assert set((tmp_path / "asked").read_text().split()) == {"--id=0000:1b:00.0"}


def test_an_unknown_field_and_a_throttled_gpu(tmp_path: Path) -> None:
    given = {"folder": tmp_path, "errors": "1", "rows": "No, No"}
    assert answers(tmp_path, SMI.format(**given, slowdown="echo Active")).throttled
    state = answers(tmp_path, SMI.format(**given, slowdown="echo 'Field is not a valid field to query.'; exit 2"))
    assert not state.throttled and len(state.notes) == 1


def test_a_missing_and_a_slow_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_state("0000:1b:00") == GpuState()
    monkeypatch.setattr(module, "SECONDS", 0.2)
    assert answers(tmp_path, "#!/bin/sh\nsleep 5") == GpuState()
