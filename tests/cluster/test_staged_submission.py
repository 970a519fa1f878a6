"""A job with stages on a target: the whole chain is sent, and its nodes train one stage after another."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.commands.submit import chosen_of, submission_on
from stoker.cli.main import main
from stoker.cluster.send import send
from stoker.cluster.shell import LocalShell
from stoker.cluster.submission import Submission
from stoker.cluster.target import open_target
from stoker.errors import UserError
from stoker.job.document.yaml_document import JobDocument, read_document
from stoker.job.stages import read_stages
from stoker.runs.run_folder import RunFolder
from tiny_llama import save_tiny_llama
from tiny_tokenizer import tiny_tokenizer

TRAIN = {"batch": 4, "seq_len": 64, "precision": "fp64", "lr": 0.01}

STAGES_OF_IT = ("first", "reward", "ppo")


def chain(base: Path, elsewhere: Path) -> dict[str, Any]:
    """Returns a chain of SFT, a reward model, and PPO with a user-defined reward; the pairs are in another folder."""
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
    """Returns the submission of `stoker submit chain.yaml`."""
    arguments = argparse.Namespace(
        job="chain.yaml", overrides=list(overrides), on=None, name=name, include=None, exclude=None
    )
    given, chosen = chosen_of(arguments)
    return submission_on(given, chosen, open_target(chosen), arguments)


def test_stages_need_all_of_their_nodes(base: Path) -> None:
    with pytest.raises(
        UserError, match=r"stages of a job need all of their nodes, and `faults.nodes.min` is 1; remove"
    ):
        submission_with("faults.nodes={min: 1, max: 2}")


def test_stages_have_no_spares(base: Path) -> None:
    with pytest.raises(UserError, match=r"spares=1`: the stages of a job have no spare nodes; remove `spares`"):
        submission_with("target.ssh.hosts=[a, b]", "target.ssh.spares=1")


def test_all_that_the_stages_name_is_sent(base: Path) -> None:
    found = submission_with("train.lr=0.02", "stages.ppo.ppo.kl=0")
    outside = next(file.path for file in found.files if file.path.endswith("/pairs.jsonl"))
    models = {f"tiny/{path.name}" for path in (base / "tiny").iterdir()}
    assert {file.path for file in found.files} == {"job.yaml", "rows.jsonl", "short.py", outside, *models}
    assert (found.nodes, found.devices, found.output, found.name) == (1, 1, "runs/chain", "chain")
    assert found.stages == ("first", "reward", "ppo") and "target" not in found.job
    assert [job.task for job in found.jobs] == ["sft", "reward", "ppo"]
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
        (["target.ssh.nodes=2"], "there are 2 nodes, and the layout", 2),
        (["target.ssh.devices=1", "stages.reward.parallel.data=2"], "2 nodes are needed, and the target has 1 host", 3),
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


def test_the_largest_stage_decides_the_nodes(base: Path) -> None:
    hosts = "target.ssh.hosts=[a, b, c]"
    found = submission_with(hosts, "stages.first.parallel.data=4")
    assert (found.nodes, found.devices) == (2, 2)
    found = submission_with(hosts, "target.ssh.nodes=2", "stages.reward.parallel.data=2")
    assert (found.nodes, found.devices) == (2, 1)
    assert found.node_words(["a:1", "b:1"])[-4:] == ["--nodes", "2", "--devices", "1"]


def test_the_file_is_read_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counting(path: str | Path) -> JobDocument:
        read.append(str(path))
        return read_document(path)

    monkeypatch.setattr("stoker.job.stages.read_document", counting)
    submission_with()
    assert read == ["chain.yaml"]


def test_a_dry_run_shows_the_chain(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "chain.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "--nodes 1 --devices 1" in said and "#   short.py" in said and "- name: reward" in said


@pytest.mark.slow  # trains three stages twice
@pytest.mark.exhaustive
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
    words = found.node_words(["127.0.0.1:29631"])[2:]
    assert words[0] == "node" and main(words) == 0
    for stage in ("first", "reward", "ppo"):
        runs = [RunFolder(folder / "runs/chain" / stage) for folder in (base, there)]
        here, sent = ([line["loss"] for line in run.read_metrics()] for run in runs)
        assert sent == here and len(here) == 2 and runs[1].is_done(), stage
    assert main(words) == 0  # resumes; all stages are done


def nodes_of(base: Path, port: int) -> list[int]:
    """Runs the chain on two nodes with one process each; returns their exit codes."""
    words = [sys.executable, "-m", "stoker", "node", "chain.yaml", "stages.first.parallel.data=2"]
    words += ["stages.reward.parallel.data=2", "--nodes", "2", "--devices", "1", "--secret", "secret"]
    words += ["--rendezvous", f"127.0.0.2:{port},127.0.0.3:{port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = [
        subprocess.Popen([*words, "--listen", f"127.0.0.{at}", "--name", f"n{at}"], cwd=base, env=environment)
        for at in (2, 3)
    ]
    try:
        return [process.wait(900) for process in begun]
    finally:
        for process in begun:
            process.kill()


@pytest.mark.exhaustive  # two nodes train three stages, then two of them again
@pytest.mark.usefixtures("warm_processes")
def test_two_nodes_train_the_chain_and_what_depends_on_a_change(base: Path) -> None:
    (base / "secret").write_text("ab" * 32)
    (base / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = int(free.getsockname()[1]) % 20_000 + 10_000  # base port; each stage uses the next one
    assert nodes_of(base, port) == [0, 0]
    words = ["stages.first.parallel.data=2", "stages.reward.parallel.data=2"]
    (base / "here").mkdir()
    assert main(["train", "chain.yaml", *words, "output=here"]) == 0
    there, here = ({s: RunFolder(base / root / s) for s in STAGES_OF_IT} for root in ("runs/chain", "here"))
    for stage, run in there.items():
        assert [line["loss"] for line in run.read_metrics()] == [line["loss"] for line in here[stage].read_metrics()]
    pairs = base.parent / "elsewhere/pairs.jsonl"
    pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[:8]))
    assert nodes_of(base, port) == [0, 0]
    for stage, run in there.items():  # the reward's and PPO's runs are new, the first is unchanged
        aside = list(run.path.parent.glob(f"{stage}.[0-9]*"))
        assert run.is_done() and len(aside) == (stage != "first"), stage
