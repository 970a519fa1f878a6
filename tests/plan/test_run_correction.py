"""A finished run corrects the next prediction for such a run: `stoker plan --from RUN`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.detect_machine import this_processor
from stoker.hardware.processor import available_cores, processor_name
from stoker.job.layout import Layout
from stoker.plan.memory.memory_formulas import peak_memory
from stoker.plan.planned_job import shape_of_name
from stoker.plan.run_correction import lesson_of
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.time.step_time import step_time
from stoker.runs.plan_record import Predicted, PredictionRecord
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import MetricsWriter, StepMetrics

SLOWER, FULLER = 1.5, 1.3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stoker.hardware.machines.detect_machine._visible_gpus", lambda: [])


def setting_on(cluster: Cluster, *, seq_len: int = 256, micro_batch: int = 4) -> Setting:
    work = TrainingWork(shape_of_name("llama-10m", Path()), seq_len, 8, precision="fp32")
    return Setting(work, cluster, Layout(), micro_batch)


def run_of(path: Path) -> RunFolder:
    """A run whose steps took 1.5 times as long as predicted, and 1.3 times the memory."""
    setting = setting_on(this_processor())
    memory, time = peak_memory(setting)[1], step_time(setting)
    folder = RunFolder(path)
    path.mkdir()
    found = Predicted(
        layout="data 1", micro_batch=4, accumulation=2, longest=256, mean=256.0, model="llama-10m", precision="fp32",
        tuning="full", device=processor_name(), threads=available_cores(), machines=1, per_machine=1, calibration=None,
        corrected_by=None, memory=dict(memory.parts), time=dict(time.parts), peak=memory.peak, upper=memory.upper,
        seconds=time.total,
    )  # fmt: skip
    PredictionRecord(found).write(folder)
    folder.write_json(folder.environment, {})
    writer = MetricsWriter(folder)
    for step in range(1, 9):
        seconds = SLOWER * time.total * (10 if step <= 2 else 1)
        gib = FULLER * memory.peak / 2**30
        writer.write(StepMetrics(step, 1.0, 1.0, 1e-3, 2048, 2048, 2048 / seconds, gib, seconds))
    writer.close()
    return folder


def test_the_next_prediction_is_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = setting_on(this_processor())
    run_of(tmp_path / "run")
    assert main(["plan", "--from", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "before" in said and "-33%" in said and "computation x 1.5" in said
    after = replace(before, cluster=this_processor())
    assert step_time(after).total == pytest.approx(SLOWER * step_time(before).total, rel=0.01)
    assert peak_memory(after)[1].peak == pytest.approx(FULLER * peak_memory(before)[1].peak, rel=0.01)
    assert "is corrected by the run" in after.cluster.notes[-1]
    longer = setting_on(this_processor(), seq_len=512)
    plain = replace(longer, cluster=before.cluster)
    assert step_time(longer).total == pytest.approx(SLOWER * step_time(plain).total, rel=0.01)


def test_a_run_that_was_predicted_with_a_correction_gives_the_same_one_again(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    first = lesson_of(folder.path)
    corrected = asdict(first.predicted) | {"peak": first.memory, "seconds": first.seconds, "corrected_by": "run"}
    PredictionRecord(Predicted(**corrected)).write(folder)
    assert lesson_of(folder.path).correction == first.correction


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path / "run")
    assert main(["plan", "--from", str(tmp_path / "run"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["correction"]["compute"] == pytest.approx(SLOWER)
    assert answer["after"]["seconds"] == pytest.approx(answer["measured"]["seconds"])
    assert answer["after"]["memory"] == pytest.approx(answer["measured"]["memory"])


def test_what_teaches_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(tmp_path / "none")]) == 2
    assert "this is not the folder of a run" in capsys.readouterr().err
    folder = run_of(tmp_path / "run")
    PredictionRecord(None, "a module's shape is not known").write(folder)
    with pytest.raises(UserError, match="nothing was predicted of the run: a module's shape"):
        lesson_of(folder.path)
    folder.plan.unlink()
    with pytest.raises(UserError, match="keeps no prediction"):
        lesson_of(folder.path)
    PredictionRecord(None).write(folder)
    folder.metrics.write_text("")
    with pytest.raises(UserError, match="nothing was predicted"):
        lesson_of(folder.path)


@pytest.mark.parametrize("content", [None, "{", "5"])
def test_a_run_without_its_environment_teaches_nothing(content: str | None, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    folder.environment.unlink()
    if content is not None:
        folder.environment.write_text(content)
    with pytest.raises(UserError, match=r"environment\.json cannot be read"):
        lesson_of(tmp_path / "run")
