"""``stoker.Trainer``: a run from Python, under the same schema and with the same results as a job file."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import blobs
import pytest
import torch
from running import run, stop_at
from torch import nn

import stoker
from stoker.errors import RunFailed, UserError
from stoker.runs.run_folder import RunFolder
from stoker.train.evaluate import evaluate

LR = 1e-2


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Trainer of the blobs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(
        stoker.Trainer,
        model=blobs.network,
        loss=blobs.loss,
        data=blobs.noisy(),
        evaluate=blobs.held_out(),
        batch=8,
        quiet=True,
        train={"precision": "fp32"},
    )


def test_fit_gives_what_the_same_job_gives(trainer: Any, base: Path) -> None:
    result = trainer(epochs=2, lr=LR, train={"precision": "fp32", "clip": 0.5}, seed=3).fit()
    module = {
        "model": "blobs:network",
        "loss": "blobs:loss",
        "data": "blobs:noisy",
        "evaluate": "blobs:held_out",
    }
    train = {"batch": 8, "lr": LR, "precision": "fp32", "clip": 0.5}
    job = {"task": "module", "module": module, "epochs": 2, "seed": 3, "train": train, "output": "run"}
    ran = run(base, job)
    assert (result.state, result.step) == ("done", 13)
    assert result.loss == ran.losses[-1] and result.evaluation == ran.loop.evaluation
    for p, q in zip(result.model.parameters(), ran.prepared.task.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert result.folder == Path.cwd() / "runs" / "module" and (result.folder / "metrics.jsonl").is_file()


def test_fit_again_is_done_and_more_steps_go_on(trainer: Any, tmp_path: Path) -> None:
    constant = {"train.schedule": "constant", "train.warmup": 0}
    first = trainer(steps=5, output="run", **constant).fit()
    again = trainer(steps=5, output="run", **constant).fit()
    assert again.step == 5 and again.loss == first.loss
    assert again.evaluation is not None and again.evaluation == first.evaluation
    further = trainer(steps=9, output="run", **constant).fit()
    whole = trainer(steps=9, output="whole", **constant).fit()
    assert further.step == 9 and further.loss == whole.loss and further.evaluation == whole.evaluation


def test_fit_stopped_goes_on(trainer: Any) -> None:
    whole = trainer(steps=9, output="whole").fit()
    one = trainer(steps=9)
    stop_at(32)(one._prepared)
    stopped = one.fit()
    assert (stopped.state, stopped.step) == ("stopped", 5)
    ended = trainer(steps=9).fit()
    assert ended.state == "done" and ended.loss == whole.loss


def test_fit_stopped_has_the_evaluation_of_its_weights(trainer: Any) -> None:
    """And not that of an earlier step."""
    one = trainer(steps=9, **{"evaluate.every": 2})
    stop_at(32)(one._prepared)
    stopped = one.fit()
    last = [e for e in RunFolder(stopped.folder).read_events() if e["event"] == "evaluated"][-1]
    assert (stopped.step, last["step"]) == (5, 4) and stopped.evaluation is not None
    assert stopped.evaluation.loss == evaluate(one._prepared.task, one._prepared.engine).loss != last["loss"]


def test_a_module_that_is_at_hand_keeps_its_weights(trainer: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    first = trainer(model=model, steps=1, data=(torch.ones(4, 6), torch.zeros(4, dtype=torch.long)), batch=4)
    expected = blobs.loss(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long))
    result = first.fit()
    assert result.loss == pytest.approx(float(expected.detach())) and result.model is model


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"trian": {"clip": 0}}, "unknown key `trian`.*`train`"),
        ({"train": {"clipp": 0}}, "unknown key `train.clipp`; write `clip`"),
        ({"train.clipp": 0}, "unknown key `train.clipp`; write `clip`"),
        ({"lr": -1.0}, "stoker.Trainer: .*train.lr"),
        ({"lr": "1e-4x"}, "stoker.Trainer: .*train.lr"),
        ({"steps": 3, "epochs": 2}, "`steps` and `epochs` both"),
        ({"tune": "lora"}, "`tune` has no effect in `task: module`"),
        ({"model": lambda: "a network"}, "model gives a str"),
        ({"train": 3, "train.clip": 0}, "only one of them"),
    ],
)
def test_wrong_keys_get_the_words_of_a_job_file(more: dict[str, Any], words: str, trainer: Any) -> None:
    with pytest.raises(UserError, match=words):
        trainer(**more)


def test_several_wrong_keys_are_told_at_once(trainer: Any) -> None:
    with pytest.raises(UserError) as caught:
        trainer(lr=-1.0, batch=0, sede=3)
    assert len(caught.value.problems) == 3


def test_importing_stoker_loads_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, stoker; assert 'torch' not in sys.modules"], check=True)
    assert stoker.Trainer.__module__ == "stoker.train.trainer"
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        stoker.Trianer  # noqa: B018


def test_a_failure_in_fit_is_a_run_that_failed(trainer: Any) -> None:
    data = (torch.full((8, 6), torch.nan), torch.zeros(8, dtype=torch.long))
    with pytest.raises(RunFailed, match="data:"):
        trainer(data=data, evaluate=None, steps=2).fit()
