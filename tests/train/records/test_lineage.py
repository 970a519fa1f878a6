"""The content of everything that a stage reads is in its lineage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import write_rows

from stoker.job.stages import read_stages
from stoker.runs.run_folder import RunFolder
from stoker.train.records.lineage import Lineage, lineage_of, standing_of


@pytest.fixture
def chain(base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stage that reads files of every kind; returns their folder."""
    monkeypatch.chdir(base)
    for name in ("model", "critic", "words"):
        shutil.copytree(sft["model"], name)
    for file in Path("words").glob("*.safetensors"):
        file.unlink()
    Path("rewards").mkdir()
    for name in ("__init__.py", "letters.py"):
        Path("rewards", name).write_text("def score(answer, expected, row):\n    return 1.0\n")
    Path("own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("beside").mkdir()
    write_rows(Path("beside/rows.jsonl"), 4)
    block = {"rewards": "python:rewards:score", "critic": "critic", "ptx": {"data": "beside"}}
    data = {"path": "rows.jsonl", "template": "own.jinja"}
    stage = {"name": "align", "task": "ppo", "data": data, "steps": 2, "ppo": block}
    model = {"name": "model", "tokenizer": "words"}
    Path("chain.yaml").write_text(yaml.safe_dump({"model": model, "output": "runs/chain", "stages": [stage]}))
    return base


def inputs(base: Path) -> dict[str, str]:
    (stage,) = read_stages("chain.yaml", []).stages
    return dict(lineage_of(stage, stage.load(), {}, base).inputs)


@pytest.mark.parametrize(
    "changed",
    [
        "rows.jsonl",
        "own.jinja",
        "model/config.json",
        "model/chat_template.jinja",
        "words/tokenizer.json",
        "critic/config.json",
        "rewards/__init__.py",
        "rewards/letters.py",
        "beside/rows.jsonl",
    ],
)
def test_a_change_of_any_file_that_a_stage_reads_is_seen(chain: Path, changed: str) -> None:
    before = inputs(chain)
    file = chain / changed
    text = file.read_text() if file.exists() else ""
    if changed.endswith(".json"):
        file.write_text(json.dumps({**json.loads(text), "changed": True}))
    else:
        file.write_text(text + (text.splitlines(keepends=True)[0] if text else "x"))
    after = inputs(chain)
    assert sum(before.get(name) != after.get(name) for name in before.keys() | after.keys()) == 1


def test_a_pattern_longer_than_a_file_name_names_no_file(chain: Path) -> None:
    before = inputs(chain)
    job = Path("chain.yaml").read_text().replace("python:rewards:score", f"regex:{'a' * 300}")
    Path("chain.yaml").write_text(job)
    assert before.keys() - inputs(chain).keys() == {"file rewards/__init__.py", "file rewards/letters.py"}


def test_inputs_that_an_earlier_version_did_not_record_are_not_a_change(chain: Path) -> None:
    folder = RunFolder(chain / "runs" / "chain")
    folder.path.mkdir(parents=True)
    folder.write_job("")
    folder.event("done")
    (chain / "model" / "chat_template.jinja").write_text("x")
    now, job = Lineage({}, inputs(chain)), read_stages("chain.yaml", []).stages[0].load().job
    known = {name: now.inputs[name] for name in ("model", "data rows.jsonl")}
    folder.write_json(folder.lineage, {"job": {}, "inputs": known})
    assert standing_of(folder, now, job).state == "done"
    folder.write_json(folder.lineage, {"version": now.version, "job": {}, "inputs": known})
    assert standing_of(folder, now, job).state == "changed"
    folder.write_json(folder.lineage, {"job": {}, "inputs": {**known, "model": "other"}})
    assert standing_of(folder, now, job).why == ("model has changed",)


def test_code_that_is_corrected_after_it_ended_a_stage_is_not_a_change(chain: Path) -> None:
    folder = RunFolder(chain / "runs" / "chain")
    folder.path.mkdir(parents=True)
    (stage,) = read_stages("chain.yaml", []).stages
    loaded = stage.load()
    folder.write_json(folder.lineage, lineage_of(stage, loaded, {}, chain).as_json())
    (chain / "rewards" / "letters.py").write_text("def score(answer, expected, row):\n    return 2.0\n")
    (chain / "rewards" / "more.py").write_text("")
    now = lineage_of(stage, loaded, {}, chain)
    for cause, state in (("RunFailed", "changed"), ("CodeFailed", "begun")):
        folder.event("failed", step=1, cause=cause)
        assert standing_of(folder, now, loaded.job).state == state


def test_a_stage_is_done_once_a_key_without_effect_is_removed(chain: Path) -> None:
    folder = RunFolder(chain / "runs" / "chain")
    folder.path.mkdir(parents=True)
    folder.write_job("")
    folder.event("done")
    text = yaml.safe_load(Path("chain.yaml").read_text())
    text["stages"][0]["evaluate"] = {"data": [{"path": "beside"}]}
    Path("chain.yaml").write_text(yaml.safe_dump(text))
    (stage,) = read_stages("chain.yaml", []).stages
    loaded = stage.load()
    now = lineage_of(stage, loaded, {}, chain)
    for key, state in (("evaluate.data.0.weight", "done"), ("train.lr", "changed")):
        before = {**now.as_json(), "job": {**now.job, key: 2.0}}
        folder.write_json(folder.lineage, before)
        assert standing_of(folder, now, loaded.job).state == state


@pytest.mark.parametrize(
    ("before", "state", "why"),
    [
        ({"steps": 2}, "done", ()),
        ({"steps": 1}, "begun", ()),  # the run goes on
        ({"steps": 3}, "changed", ("steps was 3 and is 2",)),
        ({"steps": None, "epochs": 1.0}, "changed", ("steps was None and is 2", "epochs was 1.0 and is None")),
    ],
)
def test_a_stage_goes_on_to_more_steps_and_not_to_fewer(
    before: dict[str, Any], state: str, why: tuple[str, ...], chain: Path
) -> None:
    folder = RunFolder(chain / "runs" / "chain")
    folder.path.mkdir(parents=True)
    folder.write_job("")
    folder.event("done")
    (stage,) = read_stages("chain.yaml", []).stages
    loaded = stage.load()
    now = lineage_of(stage, loaded, {}, chain)
    folder.write_json(folder.lineage, {**now.as_json(), "job": {**now.job, **before}})
    found = standing_of(folder, now, loaded.job)
    assert (found.state, found.why) == (state, why)


def test_other_files_do_not_count(chain: Path) -> None:
    before = inputs(chain)
    (chain / "notes.py").write_text("x = 1")
    (chain / "rewards" / "notes.txt").write_text("x")
    assert inputs(chain) == before
