"""``stoker verify`` on tiny jobs: what it prints, what it gives programs, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from stoker.cli.main import main
from stoker.job.load import load_job
from stoker.launch.verify import Verifier
from stoker.train.cells import Cell
from stoker.train.trace import Trace
from stoker.train.twin import make_twin

DIFFERENCES = {"max_loss_diff", "max_grad_norm_diff", "max_grad_diff", "max_weight_diff"}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose model is a configuration beside a file that is named like weights: verify reads no others."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True)
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "job.yaml"
    path.write_text("task: sft\nmodel: model\ndata: rows.jsonl\nsteps: 100\nparallel: {data: 2, shard: zero2}\n")
    return path


def test_the_jobs_own_layout_passes(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(job), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    (layout,) = found["layouts"]
    assert layout["world"] == 2 and layout["layout"]["shard"] == "zero2" and layout["passed"] is True
    assert all(0 <= layout[key] <= 1e-10 for key in DIFFERENCES)


def test_layouts_come_from_a_file(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = job.with_name("layouts.yaml")
    layouts.write_text(
        "- {recompute: full}\n- {tensor: 2, sequence: maybe}\n- {data: 4, shard: zero3, shard_size: 3}\n"
    )
    assert main(["verify", str(job), "--layouts", str(layouts), "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "twin      llama: width 64, 8 heads (2 of keys and values), vocabulary 131; 2 steps" in text
    assert "1 of 3 layouts compute what one process computes, 2 cannot be" in text
    assert text.count("cannot be: ") == 2 and "shard_size" in text and "true or false" in text


def test_a_layout_that_cannot_be_is_no_success(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = job.with_name("layouts.yaml")
    layouts.write_text("- {data: 4, shard: zero3, shard_size: 3}\n")
    assert main(["verify", str(job), "--layouts", str(layouts), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False and found["layouts"][0]["passed"] is None
    assert "shard_size" in found["layouts"][0]["reason"]
    assert all(found["layouts"][0][key] is None for key in DIFFERENCES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--layouts", "nowhere.yaml"], "there is no such file"),
        (["--layouts", "rows.jsonl"], "no list of `parallel:` blocks"),
    ],
)
def test_wrong_input_is_one_clear_message(
    arguments: list[str], words: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(job), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


class WrongPool:
    """Answers as a pool would, from one process, with an error in one gradient of every other layout."""

    size, device = 8, "cpu"

    def __init__(self, reference: Trace) -> None:
        self.reference = reference

    def run(self, function: Any, path: str, device: str, *, world: int, timeout: float) -> list[Trace]:
        if world == 1:
            return [self.reference]
        gradients = {**self.reference.gradients}
        gradients["step 1: b.weight"] = gradients["step 1: b.weight"] * (1 + 1e-9)
        return [Trace(self.reference.losses, self.reference.grad_norms, gradients, self.reference.weights)]


def test_a_wrong_gradient_fails_and_is_named(job: Path) -> None:
    import torch

    ones = torch.ones(3, dtype=torch.float64)
    reference = Trace((1.0,), (1.0,), {"step 1: a.weight": ones, "step 1: b.weight": ones}, {"a.weight": ones})
    folder = job.parent / "twin"
    folder.mkdir()
    twin = make_twin(load_job(job).job, job.parent, folder, steps=1)
    verifier = Verifier(twin, WrongPool(reference))  # type: ignore[arg-type]
    verdict = verifier.verdict(Cell("", {"data": 2}))
    assert verdict.passed is False and "the gradient of step 1: b.weight differs by 1.00e-09" in verdict.reason
    assert verdict.as_json()["max_grad_diff"] == pytest.approx(1e-9, rel=1e-6)
    assert Verifier(twin, WrongPool(reference), bound=1e-8).verdict(Cell("", {"data": 2})).passed  # type: ignore[arg-type]
