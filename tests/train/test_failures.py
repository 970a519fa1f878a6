"""What ends a run: losses that are not finite, a full disk, two processes, signals. Always with a clear error."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Crash, Ran, assert_same_state, at_sample, crash_at, run, stop_at, write_job
from torch import Tensor, nn

from stoker.checkpoint.dcp_store import Store
from stoker.errors import RunFailed, UserError
from stoker.hardware.process_device import Device
from stoker.job.load_job import load_job
from stoker.runs.listing import summarise
from stoker.runs.run_folder import RunFolder
from stoker.train import prepare as prepare_module
from stoker.train.prepared import Prepared

pytestmark = pytest.mark.usefixtures("warm_processes")

MODULE = {
    "task": "module",
    "module": {"model": "blobs:network", "loss": "blobs:loss", "data": "blobs:plain"},
    "steps": 8,
    "output": "run",
    "train": {"batch": 8, "precision": "fp32"},
    "checkpoint": {"every": 3},
}


def test_a_modules_loss_that_is_not_a_number_names_its_samples(base: Path) -> None:
    def spoil(prepared: Prepared) -> None:
        task: Any = prepared.task
        loss = task.loss_function
        calls = 0

        def spoilt(outputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return loss(outputs, targets) * (math.nan if calls == 5 else 1.0)

        task.loss_function = spoilt

    with pytest.raises(RunFailed, match="step 5: the loss is nan") as caught:
        run(base, MODULE, before=spoil)
    (event,) = [e for e in RunFolder(base / "run").read_events() if e["event"] == "not_finite"]
    assert event["step"] == 5 and len(event["rows"]) == 8 and event["rows"][0].startswith("data:")
    assert event["rows"][0] in str(caught.value) and "step 3 is untouched" in str(caught.value)
    assert Store(base / "run" / "checkpoints").steps() == [3]
    assert summarise(RunFolder(base / "run")).state == "failed"

    whole = run(base, MODULE, "output=whole")
    assert_same_state(run(base, MODULE).last_state(), whole.last_state())  # without the fault it goes on


def test_a_language_model_names_file_and_row(base: Path, sft: dict[str, Any]) -> None:
    def spoil(prepared: Prepared) -> None:
        with torch.no_grad():
            prepared.task.model.model.layers[0].mlp.up_proj.weight[0, 0] = math.inf  # type: ignore[union-attr,index]

    with pytest.raises(RunFailed, match=r"step 1: the loss is nan; the batch was .*rows\.jsonl:\d+, .*rows\.jsonl:\d+"):
        run(base, sft, before=spoil)
    assert Store(base / "run" / "checkpoints").steps() == []


def test_a_gradient_that_is_not_finite_is_told_from_a_loss(base: Path) -> None:
    def spoil(prepared: Prepared) -> None:
        weight: nn.Parameter = next(iter(prepared.task.model.parameters()))
        weight.register_hook(lambda grad: grad * math.inf)

    with pytest.raises(RunFailed, match=r"step 1: the gradient's norm is (nan|inf)"):
        run(base, MODULE, before=spoil)


def test_an_overflow_of_float16_is_skipped_and_the_run_goes_on(base: Path) -> None:
    job = {**MODULE, "train": {"batch": 8, "precision": "fp16"}}
    seen = []

    def spoil(prepared: Prepared) -> None:
        weight: nn.Parameter = next(iter(prepared.task.model.parameters()))

        def overflow(grad: Tensor) -> Tensor:
            seen.append(weight.detach().clone())
            return grad * math.inf if len(seen) == 2 else grad

        weight.register_hook(overflow)

    ran = run(base, job, before=spoil)
    assert ran.outcome.state == "done"
    assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])
    assert ran.folder.read_metrics()[1]["grad_norm"] is None
    assert [e["step"] for e in ran.folder.read_events() if e["event"] == "overflow"] == [2]
    assert ran.last_state().numbers["progress"]["left_out"] == 1
    assert ran.last_state().numbers["scaler"]["scale"] == 2.0**15  # half of what it begins with


def test_the_loss_scale_goes_on_where_it_was(base: Path) -> None:
    job = {**MODULE, "train": {"batch": 8, "precision": "fp16"}}

    def spoil(prepared: Prepared) -> None:
        weight: nn.Parameter = next(iter(prepared.task.model.parameters()))
        weight.register_hook(lambda grad: grad * math.inf)
        stop_at(8)(prepared)

    run(base, job, before=spoil)
    assert run(base, job).last_state().numbers["scaler"] | {"_growth_tracker": 0} == {
        "scale": 2.0**14, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0
    }  # fmt: skip


def test_gradients_are_clipped_without_the_loss_scale(base: Path) -> None:
    """A step of plain SGD moves the weights by lr x clip."""
    limit, lr = 0.01, 0.5
    train = {"batch": 8, "optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "lr": lr, "clip": limit, "warmup": 0}
    norms = []
    for precision in ("fp16", "fp32"):
        start: list[Tensor] = []
        job = {**MODULE, "output": precision, "steps": 1, "train": {**train, "schedule": "constant"}}
        job["train"]["precision"] = precision

        def note(prepared: Prepared, start: list[Tensor] = start) -> None:
            start += [p.detach().clone() for p in prepared.task.model.parameters()]

        ran = run(base, job, before=note)
        moved = [p.detach() - old for p, old in zip(ran.prepared.task.model.parameters(), start, strict=True)]
        assert float(nn.utils.get_total_norm(moved)) == pytest.approx(lr * limit, rel=1e-3)
        norms.append(ran.folder.read_metrics()[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and norms[1] > limit


def test_a_gradient_that_overflows_without_a_loss_scale_too_ends_the_run(base: Path) -> None:
    def spoil(prepared: Prepared) -> None:
        weight: nn.Parameter = next(iter(prepared.task.model.parameters()))
        weight.register_hook(lambda grad: grad * math.nan)

    job = {**MODULE, "steps": 20, "train": {"batch": 8, "precision": "fp16"}}
    with pytest.raises(RunFailed, match=r"step 17: the gradient's norm is nan"):  # the scale begins with 2^16
        run(base, job, before=spoil)


@pytest.mark.parametrize(
    ("layout", "why"), [("pipeline=2", "stages"), ("data=2 shard=zero3 offload=params", "gradients on the host")]
)
def test_a_device_whose_precision_excludes_the_layout_is_told(
    base: Path, sft: dict[str, Any], layout: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "device_for", lambda *_: Device("cpu", "fp16", ""))
    sft["train"] = {**sft["train"], "precision": "auto"}
    loaded = load_job(write_job(base, sft), [f"parallel.{key}" for key in layout.split()])
    with pytest.raises(UserError, match=rf"computes in fp16, .* {why}.*precision: fp32") as caught:
        prepare_module.prepare(loaded, base)
    assert "job.yaml" in str(caught.value)


def test_the_handlers_of_signals_are_put_back(base: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(base, MODULE, before=stop_at(8))
    with pytest.raises(Crash):
        run(base, MODULE, before=crash_at(40))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_twice_ends_at_once_and_the_last_checkpoint_is_whole(base: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(base, MODULE, before=at_sample(5 * 8, twice))
    folder = RunFolder(base / "run")
    assert summarise(folder).state == "interrupted" and summarise(folder).step == 5
    wait_for_writer(Store(folder.checkpoints))
    assert Store(folder.checkpoints).steps() == [3]
    whole = run(base, MODULE, "output=whole")
    assert_same_state(run(base, MODULE).last_state(), whole.last_state())


def wait_for_writer(store: Store) -> None:
    """What was being written in the background when the run ended is finished all the same."""
    while store.storage.pending():
        time.sleep(0.02)


def test_a_disk_that_fills_while_metrics_are_written(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the metrics nor the word of the failure can be written: the message still comes."""
    folder = RunFolder(base / "run")

    def fill() -> None:
        monkeypatch.setattr("stoker.runs.json_lines.no_link", lambda _, flags: os.open("/dev/full", flags))

    with pytest.raises(RunFailed, match=r"events\.jsonl cannot be written \(No space left on device\)"):
        run(base, MODULE, before=at_sample(5 * 8, fill))
    monkeypatch.undo()
    wait_for_writer(Store(folder.checkpoints))
    assert Store(folder.checkpoints).steps()[0] == 3
    whole = run(base, MODULE, "output=whole")
    assert_same_state(run(base, MODULE).last_state(), whole.last_state())


# -- in processes of their own -----------------------------------------------------------------------------

DRIVER = """
import resource, sys, time
from stoker.train.language.language_task import LanguageTask
from stoker.checkpoint.saver import Saver
pause, full = float(sys.argv[1]), sys.argv[2] == "full"
parts, save = LanguageTask.parts, Saver.save_in_background
def slow(self, first, last):
    time.sleep(pause)
    return parts(self, first, last)
def save_then_fill(self, state, keep):
    save(self, state, keep)
    if full:  # from the first checkpoint on, no file may grow beyond this
        self.wait()
        for process in (0, self.snapshots.writer.pid):
            resource.prlimit(process, resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
LanguageTask.parts, Saver.save_in_background = slow, save_then_fill
from stoker.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


def begin(base: Path, *words: str, pause: float = 0.15) -> subprocess.Popen[str]:
    """``stoker train job.yaml`` in a process of its own, each step of which takes a moment.

    It trains itself, as it is told to start nothing again: so the driver's changes are in effect.
    """
    mode = "full" if "full" in words else "-"
    given = [word for word in words if word != "full"]
    arguments = [str(pause), mode, "train", "job.yaml", "faults.restarts=0", *given]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        cwd=base,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: RunFolder, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while len(folder.read_metrics()) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.fixture
def job(base: Path, sft: dict[str, Any]) -> dict[str, Any]:
    job = {**sft, "checkpoint": {"every": 4}}
    write_job(base, job)
    return job


@pytest.fixture
def whole(base: Path, job: dict[str, Any]) -> Ran:
    return run(base, job, "output=whole")


@pytest.mark.slow
def test_killed_and_stopped_in_earnest(base: Path, job: dict[str, Any], whole: Ran) -> None:
    """kill -9 at any step, then SIGTERM at any step, then to the end; and no second process beside them."""
    folder = RunFolder(base / "run")
    killed = begin(base)
    wait_for_step(folder, 6, killed)
    assert summarise(folder).state == "running"
    killed.kill()
    killed.communicate()
    wait_for_writer(Store(folder.checkpoints))
    assert summarise(folder).state == "interrupted" and Store(folder.checkpoints).steps() == [4]

    stopped = begin(base)
    wait_for_step(folder, 7, stopped)
    stopped.send_signal(signal.SIGSTOP)  # so that it is not done meanwhile
    with pytest.raises(Exception, match="another process is training"):
        run(base, job)
    stopped.send_signal(signal.SIGCONT)
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGTERM, err
    assert "to continue: stoker train job.yaml" in out and "Traceback" not in err
    at = summarise(folder).step
    assert summarise(folder).state == "stopped" and Store(folder.checkpoints).steps()[-1] == at

    ran = run(base, job)
    assert ran.losses == whole.losses
    assert_same_state(ran.last_state(), whole.last_state())


@pytest.mark.slow
def test_a_full_disk_in_earnest(base: Path, job: dict[str, Any], whole: Ran) -> None:
    process = begin(base, "full", pause=0.0)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    (failed,) = [e for e in RunFolder(base / "run").read_events() if e["event"] == "save_failed"]
    assert failed["step"] == 8 and "the disk is full" in failed["error"]  # training goes on; what it ends with counts
    assert "error: the disk is full: the checkpoint of step 12 was not written" in err
    # The checkpoint of step 4 made room while step 12 was in memory, which the same command continues from.
    assert "Step 12 is kept in this machine's memory" in err and "Traceback" not in err
    assert summarise(RunFolder(base / "run")).state == "failed"

    ran = run(base, job)
    assert ran.losses == whole.losses
    assert_same_state(ran.last_state(), whole.last_state())


def test_a_run_as_programs_read_it(base: Path, job: dict[str, Any]) -> None:
    words = [
        sys.executable,
        "-m",
        "stoker",
        "train",
        "job.yaml",
        "steps=2",
        "evaluate.fraction=0.1",
        "--json",
    ]
    run = subprocess.run(words, cwd=base, capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    assert answer["state"] == "done" and answer["step"] == 2
    assert answer["held_out_loss"] < answer["held_out_loss_before"]
    folder = RunFolder(base / "run")
    environment = json.loads(folder.environment.read_text())
    assert environment["versions"]["torch"] == version("torch") and environment["data"]
    assert folder.job.is_file() and [m["step"] for m in folder.read_metrics()] == [1, 2]
