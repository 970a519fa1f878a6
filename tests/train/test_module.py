"""``task: module`` against a plain loop, and what is said of wrong modules, losses and data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import blobs
import numpy as np
import pytest
import torch
from running import run, write_job
from torch import nn
from torch.utils.data import TensorDataset

import stoker
from stoker.cli.main import main
from stoker.errors import UserError, raised_in
from stoker.train.module.module_task import ModuleTask, as_dataset, fingerprint_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LR = 1e-2
JOB: dict[str, Any] = {
    "task": "module",
    "module": {"model": "blobs:plain_network", "loss": "blobs:loss", "data": "blobs:doubles"},
    "epochs": 2.5,
    "output": "run",
    "train": {"batch": 8, "lr": LR, "schedule": "constant", "warmup": 0, "clip": 0, "precision": "fp32"},
}


def with_module(**changes: Any) -> dict[str, Any]:
    return {**JOB, "module": {**JOB["module"], **changes}}


def plain_loop(task: ModuleTask, model: nn.Module, steps: int, samples: int) -> list[float]:
    """A plain torch loop over the same samples in the same order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=False)
    inputs, labels = task.data.tensors  # type: ignore[attr-defined]
    losses = []
    for step in range(steps):
        rows = task.describe_samples(8 * step, min(8 * (step + 1), samples))
        chosen = [int(row.removeprefix("data:")) for row in rows]
        loss = blobs.loss(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("micro_batch", [8, 4, 1])
def test_a_run_is_a_plain_loop(micro_batch: int, base: Path) -> None:
    """The last step of the 125 samples has five, so that its micro-batches are uneven."""
    ran = run(base, {**JOB, "train": {**JOB["train"], "micro_batch": micro_batch}})
    torch.manual_seed(0)
    model = blobs.plain_network()
    losses = plain_loop(ran.prepared.task, model, 16, 125)  # type: ignore[arg-type]
    assert ran.outcome.step == 16 and ran.folder.read_metrics()[-1]["trained_tokens"] == 5
    assert ran.losses == pytest.approx(losses, rel=1e-12)
    for p, q in zip(ran.prepared.task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_the_first_event_has_the_numbers_of_the_run(base: Path) -> None:
    ran = run(base, {**JOB, "train": {**JOB["train"], "micro_batch": 4}, "seed": 3, "checkpoint": {"keep_every": 5}})
    started = next(event for event in ran.folder.read_events() if event["event"] == "started")
    assert started["plan"] == {
        "steps": 16,
        "samples": 125,
        "batch": 8,
        "micro_batch": 4,
        "clip": 0.0,
        "seed": 3,
        "evaluate_every": 1,
        "save_every": 3,
        "keep": 2,
        "keep_every": 5,
        "keep_best": True,
    }


def test_every_epoch_has_every_sample_once_in_another_order() -> None:
    task = ModuleTask(blobs.network(), blobs.loss, blobs.plain(), None, seed=3, device=CPU)
    epochs = [task.describe_samples(50 * e, 50 * (e + 1)) for e in range(3)]
    assert all(len(set(epoch)) == 50 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert task.describe_samples(45, 55) == epochs[0][45:] + epochs[1][:5]
    other = ModuleTask(blobs.network(), blobs.loss, blobs.plain(), None, seed=4, device=CPU)
    assert other.describe_samples(0, 50) != epochs[0]


def test_samples_are_widened_to_the_type_of_the_parameters() -> None:
    inputs, targets = torch.randn(4, 2), torch.randn(4, 1)
    for module, kind, expected in (
        (nn.Linear(2, 1), torch.bfloat16, torch.float32),
        (nn.Linear(2, 1).bfloat16(), torch.bfloat16, torch.bfloat16),
        (nn.Linear(2, 1), torch.float64, torch.float64),  # never narrowed
        (nn.Sequential(nn.Linear(2, 1).bfloat16(), nn.Linear(1, 1)), torch.bfloat16, torch.bfloat16),
    ):
        data = (inputs.to(kind), targets.to(kind))
        task = ModuleTask(module, nn.functional.mse_loss, data, None, seed=0, device=CPU)
        (part,) = task.parts(0, 4)
        assert isinstance(part.inputs, tuple) and {each.dtype for each in part.inputs} == {expected}


def test_evaluation_is_the_mean_over_all_held_out_samples(base: Path) -> None:
    ran = run(base, with_module(model="blobs:network", data="blobs:noisy", evaluate="blobs:held_out"))
    model, (inputs, labels) = ran.prepared.task.model.eval(), blobs.held_out().tensors
    with torch.no_grad():
        outputs = model(inputs)
    found = ran.loop.evaluation
    assert found is not None and found.targets == 50
    assert found.loss == pytest.approx(float(blobs.loss(outputs, labels)), rel=1e-6)
    assert found.accuracy == float((outputs.argmax(1) == labels).double().mean())
    assert found.perplexity == pytest.approx(np.exp(found.loss))
    assert ran.prepared.task.model.training is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "blobs:netwrok"}, r"module\.model: blobs has no 'netwrok'; did you mean 'network'\?"),
        ({"model": "blops:network"}, r"module\.model: there is no module 'blops'"),
        ({"model": "blobs:constant"}, r"blobs:constant is not callable"),
        ({"model": "blobs:no_network"}, r"gives a str, not a torch\.nn\.Module"),
        ({"loss": "blobs:losses_apart"}, r"one number \(a 0-d tensor\), not a tensor of shape \(8,\)"),
        ({"data": "blobs:no_network"}, r"a sample of data must be \(inputs, targets\), not str"),
        ({"data": "blobs:network"}, r"a sample of data must be"),
        ({"arguments": {"widht": 3}}, r"job\.yaml:2:\d+: .*blobs:plain_network raised TypeError: .*'widht'"),
        (
            {"data": "blobs:no_data"},
            r"blobs:no_data raised ValueError: the disk is empty at blobs\.py:\d+",
        ),
        ({"evaluate": "blobs:no_data"}, r"module\.evaluate: blobs:no_data raised ValueError"),
    ],
)
def test_what_is_wrong_is_said_at_its_place(changes: dict[str, str], words: str, base: Path) -> None:
    with pytest.raises(UserError, match=words):
        run(base, with_module(**changes))


def test_an_error_in_the_loss_is_named_before_its_traceback(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(base)
    monkeypatch.chdir(base)
    (base / "own_loss.py").write_text("def loss(outputs, targets):\n    return outputs.men()\n")
    write_job(base, with_module(loss="own_loss:loss"))
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    told = r"^error: job\.yaml:2:\d+: step 1: module\.loss: own_loss:loss raised AttributeError: .* at own_loss\.py:2$"
    first = re.search(told, said, re.M)
    assert first is not None
    assert said[first.end() :].startswith("\nTraceback") and "outputs.men()" in said[first.end() :]


def test_an_error_in_the_forward_pass_is_named_before_its_traceback(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(base)
    monkeypatch.chdir(base)
    (base / "own_network.py").write_text(
        "from torch import nn\n\nclass Network(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Linear(5, 3)\n\n    def forward(self, inputs):\n        return self.inner(inputs)\n"
    )
    write_job(base, with_module(model="own_network:Network"))
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    told = (
        r"^error: job\.yaml:2:\d+: step 1: module\.model: own_network:Network raised RuntimeError: "
        r"mat1 and mat2 .* at own_network\.py:9$"
    )
    first = re.search(told, said, re.M)
    assert first is not None, said
    assert said[first.end() :].startswith("\nTraceback") and "self.inner(inputs)" in said[first.end() :]


def test_the_line_of_an_error_may_be_in_a_library_whose_name_begins_like_torch() -> None:
    """As torchvision's, whose modules a job may name."""
    code = "from torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n        return x.absent\n"
    library: dict[str, Any] = {}
    exec(compile(code, f"{Path(torch.__file__).parent}vision/net.py", "exec"), library)
    with pytest.raises(AttributeError) as raised:
        library["Net"]()(1)
    assert raised_in(raised.value).endswith(" at net.py:5")


def test_a_lost_process_is_no_error_of_the_loss(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(base)
    (base / "gone.py").write_text("def loss(outputs, targets):\n    raise RuntimeError('Connection closed by peer')\n")
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        run(base, with_module(loss="gone:loss"))


def test_a_frozen_batch_norm_stays_in_evaluation_mode(base: Path) -> None:
    """An evaluation changes no step, and a resumed run, which has not evaluated before its first step, none either."""
    plain, evaluated = (
        run(base, {**with_module(model="blobs:frozen_norm", **held_out), "output": f"run{len(held_out)}"})
        for held_out in ({}, {"evaluate": "blobs:doubles"})
    )
    assert evaluated.loop.evaluation is not None and evaluated.losses == plain.losses
    assert [module.training for module in evaluated.prepared.task.model] == [True, False, True, True]


def test_a_module_that_cannot_be_imported_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(base)
    (base / "half_written.py").write_text("def network(:\n")
    with pytest.raises(UserError, match=r"job\.yaml:2:\d+: module\.model: importing half_written raised SyntaxError"):
        run(base, with_module(model="half_written:network"))


def test_a_name_within_a_name_is_found(base: Path) -> None:
    assert run(base, with_module(loss="torch.nn:functional.cross_entropy")).outcome.state == "done"


def test_a_missing_module_is_told_at_its_line(base: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(base, with_module(model="blops:network"))
    assert str(caught.value).startswith(f"{base / 'job.yaml'}:2:")


def test_datasets() -> None:
    pair = (torch.zeros(4, 2), torch.zeros(4))
    assert isinstance(as_dataset(pair, "data"), TensorDataset)
    for wrong, words in (
        (iter([1]), "must be a dataset"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "holds no samples"),
        ([1, 2], "must be .inputs, targets."),
    ):
        with pytest.raises(UserError, match=words):
            as_dataset(wrong, "data")
    other = (pair[0] + 1, pair[1])
    assert fingerprint_of(TensorDataset(*pair)) == fingerprint_of(TensorDataset(*pair))
    assert fingerprint_of(TensorDataset(*pair)) != fingerprint_of(TensorDataset(*other))
    reshaped, typed = (pair[0].view(4, 1, 2), pair[1]), (pair[0].view(torch.int32), pair[1])
    assert len({fingerprint_of(TensorDataset(*data)) for data in (pair, reshaped, typed)}) == 3
    assert fingerprint_of(blobs.noisy()) == "50 samples"


def test_a_module_without_trained_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="no parameter that is trained"):
        stoker.Trainer(model=nn.ReLU(), loss=blobs.loss, data=blobs.plain())


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="the tensors of data differ in length: 90, 100"):
        as_dataset((torch.zeros(90, 2), torch.zeros(100)), "data")
