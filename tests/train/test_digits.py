"""The digits example: it learns, and it is the shortest of its kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.examples import digits
from stoker.job.recipes import write_recipe
from stoker.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_digits_learn(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = ROOT / "examples" / "digits.py"
    words = [sys.executable, str(script)]
    out = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    accuracy = float(out.strip().splitlines()[-1].removeprefix("held-out accuracy ").removesuffix("%"))
    assert accuracy > 95
    lines = (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["loss"] < json.loads(lines[0])["loss"] / 5


@pytest.mark.slow
def test_the_recipe_ends_as_a_plain_loop_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(write_recipe("module-digits"))
    assert main(["train", "job.yaml", "faults.restarts=0"]) == 0
    evaluated = [e for e in RunFolder(tmp_path / "runs" / "job").read_events() if e["event"] == "evaluated"]
    assert evaluated[-1]["accuracy"] > 0.97


@pytest.mark.slow
def test_the_snippet_of_the_docs_ends_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = (ROOT / "docs" / "modules.md").read_text().split("```python\n")[1:]
    snippet = next(block for block in blocks if "digits" in block).partition("```")[0]
    exec(compile(snippet, "modules.md", "exec"), {})
    evaluated = [e for e in RunFolder(tmp_path / "runs" / "module").read_events() if e["event"] == "evaluated"]
    assert evaluated[-1]["accuracy"] > 0.97


def test_digits_are_split_without_overlap() -> None:
    train, test = digits.train_data(), digits.test_data()
    assert len(train) + len(test) == 1797 and train.tensors[0].shape[1:] == (1, 8, 8)
    batch, labels = next(iter(DataLoader(test, batch_size=len(test))))
    assert set(labels.tolist()) == set(range(10)) and 0 <= float(batch.min()) <= float(batch.max()) <= 1
    assert digits.network()(batch).shape == (len(test), 10)


def test_without_scikit_learn_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        digits.train_data()


def test_stoker_needs_the_fewest_lines() -> None:
    def lines(name: str) -> int:
        text = (ROOT / "examples" / f"{name}.py").read_text()
        return sum(bool(line.strip()) for line in text.splitlines())

    assert lines("digits") < lines("digits_accelerate") < lines("digits_transformers")
