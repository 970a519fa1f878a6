"""Which files a job names: rewards, runs and other data of its task, at the paths that the nodes have them at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from submitting import submission_in

from stoker.cluster.sent_files import ARCHIVE
from stoker.cluster.submission import Submission
from stoker.data.files.readers import decode
from stoker.data.files.rows import Raw
from stoker.data.sources import open_source
from stoker.errors import UserError
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.document.yaml_document import parse_document
from stoker.job.load_job import check_document, load_job

SSH: dict[str, Any] = {"ssh": {"hosts": ["a"], "code": False}}


def sent_in(folder: Path, *, task: str = "ppo", **block: Any) -> Submission:
    """The submission of a policy's job."""
    return submission_in(folder, task=task, target=SSH, **{task: {"max_tokens": 8, **block}})


def paths_of(submission: Submission) -> set[str]:
    """The paths of what is sent, beside the job, its data and the code."""
    return {file.path for file in submission.files} - {"job.yaml", "rows.jsonl", ARCHIVE}


def job_of(submission: Submission) -> Any:
    """The job as the nodes have it."""
    return check_document(parse_document(submission.job, "job.yaml")).job


def made_run(folder: Path, *, steps: tuple[int, ...] = (3, 6), **keys: Any) -> Path:
    """The folder of a run of task reward, with checkpoints that nothing has been trained for."""
    checkpoints = (
        folder.parent.parent / str(keys["checkpoint"]["to"]) if "checkpoint" in keys else folder / "checkpoints"
    )
    for step in steps:
        place = checkpoints / f"step-{step:08}"
        place.mkdir(parents=True)
        for name in ("state.json", ".metadata", "__0_0.distcp"):
            (place / name).write_text(f"{name} of {step}")
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/rank-0.log").touch()
    (folder / "events.jsonl").touch()
    job = {"task": "reward", "model": "llama-tiny", "data": "pairs.jsonl", "steps": 6, **keys}
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder


def of_run(folder: str, checkpoints: str = "checkpoints") -> set[str]:
    step = f"{checkpoints}/step-00000006"
    files = {f"{step}/{name}" for name in ("state.json", ".metadata", "__0_0.distcp")}
    return {f"{folder}/{name}" for name in files} | {f"{folder}/job.yaml", f"{folder}/events.jsonl"}


@pytest.mark.parametrize("task", ["ppo", "grpo"])
@pytest.mark.parametrize("named", ["runs/rm", "rm", "./runs/rm"])
def test_the_reward_run_comes_with_its_newest_checkpoint(tmp_path: Path, task: str, named: str) -> None:
    made_run(tmp_path / "runs/rm")
    found = sent_in(tmp_path, task=task, reward=named)
    assert paths_of(found) == of_run("runs/rm")
    assert getattr(job_of(found), task).reward == named


def test_a_run_that_lies_elsewhere_names_its_model_as_it_is_there(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    model = elsewhere / "tiny"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    made_run(elsewhere / "rm", model=str(model))
    found = sent_in(here, reward="../elsewhere/rm")
    block = job_of(found).ppo
    assert block.reward.startswith("outside/") and block.reward.endswith("/rm")
    job = next(file for file in found.files if file.path == f"{block.reward}/job.yaml")
    there = tmp_path / "there.yaml"
    there.write_bytes(job.read())
    moved = load_job(there).job
    assert moved.model is not None
    inside = {f"{moved.model.name}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert paths_of(found) == of_run(block.reward) | inside
    assert moved.model.name.startswith("outside/")


def test_checkpoints_that_lie_beside_the_run(tmp_path: Path) -> None:
    made_run(tmp_path / "runs/rm", checkpoint={"to": "kept/rm"})
    step = "kept/rm/step-00000006"
    expected = {f"{step}/{name}" for name in ("state.json", ".metadata", "__0_0.distcp")}
    assert paths_of(sent_in(tmp_path, reward="rm")) == expected | {"runs/rm/job.yaml", "runs/rm/events.jsonl"}


@pytest.mark.parametrize(
    ("steps", "named", "told"),
    [((), "rm", "runs/rm has no checkpoint yet"), ((6,), "rn", r"there is no run rn; did you mean runs/rm")],
)
def test_a_run_that_cannot_be_sent(tmp_path: Path, steps: tuple[int, ...], named: str, told: str) -> None:
    made_run(tmp_path / "runs/rm", steps=steps)
    with pytest.raises(UserError, match=told) as error:
        sent_in(tmp_path, reward=named)
    assert error.value.problems[0].line and error.value.exit_code == 2


@pytest.mark.parametrize("form", ["text", "list", "mapping"])
def test_schemas_and_modules_of_rewards(tmp_path: Path, form: str) -> None:
    here = tmp_path / "here"
    (here / "forms").mkdir(parents=True)
    (here / "forms/one.json").write_text("{}")
    (tmp_path / "two.json").write_text("{}")
    (here / "letter.py").write_text("def e(answer, expected, row): return 0.0\n")
    (here / "grpo").mkdir()  # the name of a task, and no file of the job
    (here / "grpo/not_sent.txt").touch()
    names = ["json_schema:forms/one.json", f"json_schema:{tmp_path}/two.json", "python:letter:e", "numeric"]
    given: Any = {"text": names[1], "list": names, "mapping": dict.fromkeys(names, 0.5)}[form]
    found = sent_in(here, task="grpo", rewards=given)
    rewards = job_of(found).grpo.rewards
    if form == "text":
        assert paths_of(found) == {rewards.removeprefix("json_schema:")} and rewards.endswith("/two.json")
        return
    second = list(rewards)[1].removeprefix("json_schema:")
    assert second.startswith("outside/") and second.endswith("/two.json")
    assert paths_of(found) == {"forms/one.json", second, "letter.py"}
    assert list(rewards) == [names[0], f"json_schema:{second}", *names[2:]]
    assert form == "list" or list(rewards.values()) == [0.5] * 4


def test_the_environment_and_other_data_of_a_policy(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/answer.py").write_text("def reply(messages, row): return None\n")
    (tmp_path / "more.jsonl").write_text('{"text": "a"}\n')
    found = sent_in(tmp_path, rewards="numeric", environment="python:tools.answer:reply", ptx={"data": "more.jsonl"})
    assert paths_of(found) == {"tools/answer.py", "more.jsonl"}


def test_the_reference_of_dpo_is_a_run_or_a_model(tmp_path: Path) -> None:
    made_run(tmp_path / "runs/sft", task="sft", data="rows.jsonl")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text("{}")
    for named, expected in (("sft", of_run("runs/sft")), ("tiny", {"tiny/config.json"}), ("org/model", set())):
        found = submission_in(tmp_path, task="dpo", target=SSH, dpo={"reference": named})
        assert paths_of(found) == expected, named


def test_on_a_login_node_runs_stay_where_they_are(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    (elsewhere / "tiny").mkdir(parents=True)
    (elsewhere / "tiny/config.json").write_text("{}")
    made_run(elsewhere / "rm", model=str(elsewhere / "tiny"))
    found = submission_in(
        here, task="ppo", target={"slurm": {"nodes": 1, "code": False}}, ppo={"reward": str(elsewhere / "rm")}
    )
    assert job_of(found).ppo.reward == str(elsewhere / "rm")
    assert [file.path for file in found.files if not file.in_place] == ["job.yaml"]


PATTERNS = ["dumps/*/train.jsonl", "dumps/**/train.jsonl", "dumps/?/tr*.jsonl", "dumps/**", "../here/*/*/*"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("base", ["here", "elsewhere"])
def test_every_file_of_a_pattern_is_sent_to_a_path_that_the_pattern_matches(
    tmp_path: Path, pattern: str, base: str
) -> None:
    for name, folder in (("a", "kept"), ("b", "here/dumps/b")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "train.jsonl").write_text(f'{{"instruction": "{name}", "output": "c"}}\n')
    (tmp_path / "here/dumps/a").symlink_to(tmp_path / "kept")
    (tmp_path / base).mkdir(exist_ok=True)
    written = pattern if base == "here" else str(tmp_path / "here" / pattern)
    found = submission_in(tmp_path / base, data=written, target=SSH)
    for file in found.files:
        if file.source is not None:
            (tmp_path / "node" / file.path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "node" / file.path).write_bytes(file.read())
    sources = [
        open_source(SourceBlock(path=written), tmp_path / base),
        open_source(job_of(found).data[0], tmp_path / "node"),
    ]
    for source in sources:
        values = [decode(raw) for raw in source.rows() if isinstance(raw, Raw)]
        assert [value["instruction"] for value in values if isinstance(value, dict)] == ["a", "b"]


def test_a_name_with_a_line_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a\nb.txt").touch()
    with pytest.raises(UserError, match=r"^'[^']*more/a\\nb.txt' cannot be sent: its name has a line end"):
        submission_in(tmp_path, target={"ssh": {**SSH["ssh"], "send": ["more"]}})


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / os.fsdecode(b"more/caf\xe9.txt")).touch()
    with pytest.raises(UserError, match="cannot be sent: its name is not UTF-8"):
        submission_in(tmp_path, target={"ssh": {**SSH["ssh"], "send": ["more"]}})
