"""A job with stages on a target: the whole chain is sent, and one node trains its stages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import main
from stoker.cli.submit import chosen_of, submission_on
from stoker.cluster.send import send
from stoker.cluster.shell import LocalShell
from stoker.cluster.submission import Submission
from stoker.cluster.target import open_target
from stoker.errors import UserError
from stoker.job.stages import read_stages
from stoker.runs.run_folder import RunFolder
from tiny_llama import save_tiny_llama
from tiny_tokenizer import tiny_tokenizer

TRAIN = {"batch": 4, "seq_len": 64, "precision": "fp64", "lr": 0.01}


def chain(base: Path, elsewhere: Path) -> dict[str, Any]:
    """SFT, a reward model and PPO with a further reward of the user's own; the pairs lie elsewhere."""
    save_tiny_llama(base / "tiny", tiny_tokenizer())
    (base / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}", "completion": f"{i}"}) + "\n" for i in range(12))
    )
    pairs = [{"prompt": f"say {i}", "chosen": f"{i} {i}", "rejected": "no"} for i in range(12)]
    elsewhere.mkdir()
    (elsewhere / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (base / "short.py").write_text("def score(answer, expected, row):\n    return 1 / (1 + len(answer))\n")
    begin = {"model": {"from": "first"}, "steps": 2}
    block = {"reward": "reward", "rewards": {"python:short:score": 0.5}, "prompts": 4, "max_tokens": 4}
    return {
        "model": "tiny", "data": "rows.jsonl", "train": TRAIN, "evaluate": {"fraction": 0}, "parallel": {"data": 1},
        "stages": [
            {"name": "first", "task": "sft", "steps": 2},
            {"name": "reward", "task": "reward", **begin, "data": str(elsewhere / "pairs.jsonl")},
            {"name": "ppo", "task": "ppo", **begin, "tune": {"method": "lora", "rank": 2}, "ppo": block},
        ],
    }  # fmt: skip


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = {**chain(here, tmp_path / "elsewhere"), "target": {"ssh": {"hosts": ["a"], "code": False}}}
    (here / "chain.yaml").write_text(json.dumps(job))
    return here


def submission_with(*overrides: str, name: str | None = None) -> Submission:
    """What `stoker submit chain.yaml` would send."""
    arguments = argparse.Namespace(
        job="chain.yaml", overrides=list(overrides), on=None, name=name, include=None, exclude=None
    )
    jobs, chosen = chosen_of(arguments)
    return submission_on(jobs, chosen, open_target(chosen), arguments)


def test_all_that_the_stages_name_is_sent(base: Path) -> None:
    found = submission_with("train.lr=0.02", "stages.ppo.ppo.kl=0")
    outside = next(file.path for file in found.files if file.path.endswith("/pairs.jsonl"))
    models = {f"tiny/{path.name}" for path in (base / "tiny").iterdir()}
    assert {file.path for file in found.files} == {"job.yaml", "rows.jsonl", "short.py", outside, *models}
    assert (found.nodes, found.devices, found.output, found.name) == (1, 1, "runs/chain", "chain")
    assert found.stages == ("first", "reward", "ppo") and "target" not in found.job
    (base / "there.yaml").write_text(found.job)
    sent, own = read_stages("there.yaml"), read_stages("chain.yaml", ["train.lr=0.02", "stages.ppo.ppo.kl=0"])
    for there, here in zip(sent.stages, own.stages, strict=True):
        expected = here.load().job.model_copy(update={"target": "local"})
        data = [source.model_copy(update={"path": outside}) for source in expected.data]
        if there.name == "reward":
            expected = expected.model_copy(update={"data": data})
        assert there.load().job == expected and there.needs == here.needs, there.name


@pytest.mark.parametrize(
    ("overrides", "told", "code"),
    [
        (["target.ssh.nodes=2"], "`nodes` is 2, and the stages of a job run on one node", 2),
        (["target.ssh.devices=1", "stages.reward.parallel.data=2"], "stage reward has 2 processes, and `devices`", 3),
        (["stages.ppo.ppo.reward=no-such-run"], "there is no run no-such-run", 2),
        (["stages.first.data=gone.jsonl"], "gone.jsonl", 2),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sent(
    base: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], told: str, code: int
) -> None:
    with pytest.raises(UserError, match=told) as error:
        submission_with(*overrides)
    assert error.value.exit_code == code
    assert main(["submit", "chain.yaml", "--dry-run", *overrides]) == code
    assert "error: " in capsys.readouterr().err


def test_a_dry_run_shows_the_chain(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "chain.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "--nodes 1 --devices 1" in said and "#   short.py" in said and "- name: reward" in said


@pytest.mark.slow  # trains three stages twice
def test_the_chain_trains_there_as_here(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = submission_with()
    assert main(["train", "chain.yaml"]) == 0
    send(LocalShell(), found.files, str(tmp_path / "target"), "chain")
    (tmp_path / "elsewhere/pairs.jsonl").unlink()
    there = tmp_path / "target/chain"
    monkeypatch.chdir(there)
    secret = there / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    words = found.node_words(python="", rendezvous=["127.0.0.1:29631"])[3:]
    assert words[0] == "node" and main(words) == 0
    for stage in ("first", "reward", "ppo"):
        runs = [RunFolder(folder / "runs/chain" / stage) for folder in (base, there)]
        here, sent = ([line["loss"] for line in run.read_metrics()] for run in runs)
        assert sent == here and len(here) == 2 and runs[1].is_done(), stage
    assert main(words) == 0  # goes on where it stopped: all is done
