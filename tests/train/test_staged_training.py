"""``stoker train`` of a file with stages: one after another, going on after a kill, restarting what depends."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.cli.train.stages import train_stages
from stoker.job.load_job import LoadedJob
from stoker.job.stage import Stage
from stoker.launch.run_spec import RunSpec
from stoker.runs.run_folder import RunFolder
from stoker.train.run_result import RunResult

pytestmark = pytest.mark.usefixtures("warm_processes")

SCORE = """def e(answer, expected, row):
    text = "".join(answer.split())
    return text.count("e") / max(1, len(text))
"""
IN_THIS_PROCESS = "faults.restarts=0"


@pytest.fixture
def job(base: Path, sft: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two independent tunings, and a policy that begins with the first of them."""
    monkeypatch.chdir(base)
    (base / "letter.py").write_text(SCORE)
    with (base / "asked.jsonl").open("w") as file:
        for i in range(12):
            file.write(json.dumps({"prompt": f"Say {i} words about the sea", "expected": str(i)}) + "\n")
    shared = {key: sft[key] for key in ("model", "train", "evaluate")} | {"output": "runs/chain"}
    policy = {"rewards": "python:letter:e", "prompts": 2, "answers": 2, "max_tokens": 4}
    first = {"name": "first", "task": "sft", "data": "rows.jsonl", "steps": 3, "tune": {"method": "lora", "rank": 2}}
    other = {"name": "other", "task": "sft", "data": "rows.jsonl", "steps": 2}
    align = {"name": "align", "task": "grpo", "model": {"from": "first"}, "data": "asked.jsonl", "steps": 2}
    return {**shared, "stages": [first, other, {**align, "grpo": policy}]}


def write(job: dict[str, Any]) -> None:
    Path("chain.yaml").write_text(yaml.safe_dump(job, sort_keys=False))


Train = Callable[..., dict[str, bool]]


@pytest.fixture
def train(job: dict[str, Any], capsys: pytest.CaptureFixture[str], in_process_replay: None) -> Train:
    """Trains as the command does and says of each stage whether it was left as it is."""
    write(job)

    def run(*words: str) -> dict[str, bool]:
        capsys.readouterr()
        assert main(["train", "chain.yaml", IN_THIS_PROCESS, "--json", *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        return {stage["stage"]: stage["unchanged"] for stage in answer["stages"]}

    return run


def test_stages_run_in_turn_and_each_begins_with_what_it_names(job: dict[str, Any], train: Train) -> None:
    assert train("--only", "first") == {"first": False}
    assert train() == {"first": True, "other": False, "align": False}
    assert train() == {"first": True, "other": True, "align": True}
    (merged,) = Path("runs/chain").glob("first.merged-*")
    begun = load_file(merged / "model.safetensors")
    base = load_file(Path(job["model"]) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(begun[name], base[name])  # the adapter is in it
    assert f"model:\n  name: {merged}\n" in RunFolder(Path("runs/chain/align")).job.read_text()


def test_a_change_restarts_only_what_depends_on_it(job: dict[str, Any], train: Train, capsys: Any) -> None:
    train()
    assert train("stages.other.train.lr=1e-3") == {"first": True, "other": False, "align": True}
    assert Path("runs/chain/other.1").is_dir()
    Path("letter.py").write_text(SCORE.replace('"e"', '"a"'))  # the reward's code is an input
    assert train("stages.other.train.lr=1e-3") == {"first": True, "other": True, "align": False}
    assert train("stages.other.train.lr=1e-3", "stages.first.seed=5") == {"first": False, "other": True, "align": False}
    open_run("runs/chain/align.2", Path.cwd())  # the weights that it began with are still there
    assert [path.name for path in sorted(Path("runs/chain").iterdir()) if ".merged-" not in path.name] == [
        "align", "align.1", "align.2", "first", "first.1", "other", "other.1", "stages.json",
    ]  # fmt: skip


class Stopping:
    """Runs a stage that a signal stops."""

    alone, first, command = True, True, ("stoker", "node", "chain.yaml")

    def train(self, stage: Stage, loaded: LoadedJob, *_: Any, quiet: bool) -> tuple[RunSpec, RunResult]:
        ending = RunResult("stopped", 1, 2, signal.SIGTERM, 1.0, 1.0, None, None, None, None, False, 143)
        return RunSpec(loaded, Path.cwd(), Path.cwd() / loaded.job.output, quiet=quiet), ending


def test_stages_that_stop_name_the_command_of_their_runner(job: dict[str, Any], capsys: Any) -> None:
    write(job)
    arguments = Namespace(job="chain.yaml", overrides=[], only=None, begin=None, fresh=False, json=False)
    assert train_stages(arguments, None, Stopping()) != 0
    assert "to continue: stoker node chain.yaml\n" in capsys.readouterr().out


def test_data_is_compared_by_content(train: Train) -> None:
    assert train("--only", "other") == {"other": False}
    rows = Path("rows.jsonl")
    text = rows.read_text()
    rows.write_text(text)  # written again, the same
    assert train("--only", "other") == {"other": True}
    rows.write_text(text.replace("sea", "lake"))
    assert train("--only", "other") == {"other": False}


def test_more_steps_go_on_and_fewer_start_over(train: Train) -> None:
    train("--only", "other")
    assert train("--only", "other", "stages.other.steps=4") == {"other": False}
    folder = RunFolder(Path("runs/chain/other"))
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3, 4] and folder.is_done()
    assert any(event["event"] == "resumed" for event in folder.read_events())
    assert train("--only", "other", "stages.other.steps=3") == {"other": False}
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    assert Path("runs/chain/other.1").is_dir()


def test_what_does_not_change_the_result_restarts_nothing(train: Train) -> None:
    train("--only", "other")
    words = ("checkpoint.every=1", "train.micro_batch=2", "faults.back_off=2")
    assert train("--only", "other", *words) == {"other": True}


def test_a_run_that_no_stage_has_made_is_put_aside(train: Train) -> None:
    train("--only", "other")
    RunFolder(Path("runs/chain/other")).lineage.unlink()
    assert train("--only", "other") == {"other": False}
    assert Path("runs/chain/other.1").is_dir()


def test_fresh_starts_over(train: Train) -> None:
    train("--only", "other")
    assert train("--only", "other", "--fresh") == {"other": False}
    assert Path("runs/chain/other.1").is_dir()


def test_a_stage_that_starts_over_takes_its_checkpoints_along(train: Train) -> None:
    train("--only", "other", "checkpoint.to=there")
    assert train("--only", "other", "checkpoint.to=there", "stages.other.train.lr=1e-3") == {"other": False}
    assert train("--only", "other", "checkpoint.to=there", "stages.other.train.lr=1e-3", "--fresh") == {"other": False}
    found = {str(path.parent.relative_to("there")) for path in Path("there").rglob("step-*") if path.is_dir()}
    assert sorted(found) == ["other", "other/other.1", "other/other.2"]


def test_nothing_is_written_where_the_data_does_not_pass(job: dict[str, Any], train: Train, capsys: Any) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": ""}\n' * 3)
    assert main(["train", "chain.yaml", IN_THIS_PROCESS]) == 2
    assert not Path("runs").exists()


def test_data_of_a_later_stage_is_audited_before_the_first_trains(
    job: dict[str, Any], train: Train, capsys: Any
) -> None:
    Path("asked.jsonl").write_text('{"prompt": ""}\n' * 3)
    assert main(["train", "chain.yaml", IN_THIS_PROCESS]) == 2
    line = 1 + Path("chain.yaml").read_text()[: Path("chain.yaml").read_text().index("asked.jsonl")].count("\n")
    assert f"chain.yaml:{line}:" in (error := capsys.readouterr().err) and "stage align: " in error
    assert not Path("runs").exists()


def test_runs_lists_the_stages_in_their_order(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("--only", "other")
    assert main(["runs", "chain", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    states = [(stage["name"], stage["needs"], stage["state"]) for stage in listed]
    assert states == [("first", [], "waiting"), ("other", [], "done"), ("align", ["first"], "waiting")]
    assert main(["runs", "runs/chain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "first", "other", "align"]


def test_a_model_from_random_weights_is_tuned_and_exported(job: dict[str, Any], base: Path, train: Train) -> None:
    """The second stage begins with the trained weights, and not with random ones again."""
    given = Path(job["model"])
    shutil.copytree(given, base / "fresh")
    (base / "fresh" / "model.safetensors").unlink()
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 64}
    grown = {"name": "grown", "task": "pretrain", "data": {"path": "text.txt"}, "steps": 2}
    tuned = {"name": "tuned", "task": "sft", "model": {"from": "grown"}, "tune": "lora", "data": "rows.jsonl"}
    (base / "text.txt").write_text("the sea is wide and the shore is long\n" * 40)
    grown["model"] = {"name": "fresh", "weights": "random", "config": changes}
    write({**job, "stages": [grown, {**tuned, "steps": 1}]})
    assert train() == {"grown": False, "tuned": False}
    (merged,) = Path("runs/chain").glob("grown.merged-*")
    config = json.loads((merged / "config.json").read_text())
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (1, 64)
    begun, stored = open_run("runs/chain/tuned", Path.cwd()), load_file(merged / "model.safetensors")
    key = "layers.0.self_attn.o_proj.weight"  # no adapter is in it, or it is the base's weight
    (found,) = [
        p for name, p in begun.model.named_parameters() if "lora" not in name and "layers.0.self_attn.o_proj" in name
    ]
    assert torch.equal(found.detach(), stored[f"model.{key}"])
    (again,) = [p for n, p in open_run("runs/chain/grown", Path.cwd()).model.named_parameters() if n.endswith(key)]
    assert torch.equal(again.detach(), stored[f"model.{key}"])


def test_a_launcher_trains_one_job(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write(job)
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**names, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "chain.yaml"]) == 2
    assert "a job with stages cannot be started by torchrun or srun" in capsys.readouterr().err


@pytest.fixture
def rlhf(job: dict[str, Any], base: Path) -> dict[str, Any]:
    """SFT, a reward model and PPO against it, all adapters over the model after SFT."""
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(16):
            row = {
                "prompt": f"Say {i} words about the sea",
                "chosen": "the sea " * (1 + i % 3),
                "rejected": f"wind {i}",
            }
            file.write(json.dumps(row) + "\n")
    first, _, _ = job["stages"]
    begin = {"model": {"from": "first"}, "tune": first["tune"], "steps": 2}
    reward = {"name": "reward", "task": "reward", "data": "pairs.jsonl", **begin}
    block = {"reward": "reward", "prompts": 4, "max_tokens": 4}
    return {
        **job,
        "stages": [first, reward, {"name": "ppo", "task": "ppo", "data": "asked.jsonl", **begin, "ppo": block}],
    }


def test_sft_reward_and_ppo(rlhf: dict[str, Any], train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    write(rlhf)
    assert main(["plan", "chain.yaml", "--json"]) == 0
    planned = {stage["name"]: stage["resident"] for stage in json.loads(capsys.readouterr().out)["stages"]}
    assert planned["ppo"] == ["policy (lora)", "reference (its base)", "reward", "critic"]
    assert train() == {"first": False, "reward": False, "ppo": False}
    recorded = json.loads(RunFolder(Path("runs/chain/ppo")).environment.read_text())
    assert recorded["facts"]["critic"] == "begins as the reward model"
    assert train("stages.reward.train.lr=1e-3") == {"first": True, "reward": False, "ppo": False}
    assert train("stages.reward.train.lr=1e-3", "stages.ppo.ppo.kl=0") == {"first": True, "reward": True, "ppo": False}


@pytest.mark.slow  # trains four stages
def test_an_earlier_stage_is_the_critic(rlhf: dict[str, Any], train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    ppo = rlhf["stages"][2]
    rlhf["stages"][2] = {**ppo, "tune": "full", "ppo": {**ppo["ppo"], "critic": "reward"}}
    write(rlhf)
    assert main(["plan", "chain.yaml", "--json"]) == 0
    capsys.readouterr()
    assert train() == {"first": False, "reward": False, "ppo": False}
    recorded = json.loads(RunFolder(Path("runs/chain/ppo")).environment.read_text())
    assert recorded["facts"]["critic"].startswith("runs/chain/reward: ")
    lineage = json.loads(RunFolder(Path("runs/chain/ppo")).lineage.read_text())
    assert "ppo.critic" not in lineage["job"] and {"stage first", "stage reward"} <= lineage["inputs"].keys()
    assert train("stages.reward.train.lr=1e-3") == {"first": True, "reward": False, "ppo": False}


@pytest.mark.slow  # starts the command four times, each of which starts workers
@pytest.mark.timeout(600)
def test_killed_within_and_between_stages(job: dict[str, Any], tmp_path: Path) -> None:
    """kill -9 within a stage and while weights are merged; the end is that of one go."""
    job["checkpoint"] = {"every": 1}
    write(job)
    command = [sys.executable, "-m", "stoker", "train", "chain.yaml"]
    undisturbed = subprocess.run([*command, "output=runs/whole"], capture_output=True, text=True, check=False)
    assert undisturbed.returncode == 0, undisturbed.stderr
    run = Path("runs/chain")
    for seen in ("first/checkpoints/step-00000001", ".first.merged-*.partial"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            deadline = time.monotonic() + 240
            while not list(run.glob(seen)):
                assert process.poll() is None and time.monotonic() < deadline, process.communicate()
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
    last = subprocess.run(command, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stderr
    assert "stage 1 of 3, first: done, unchanged" in last.stdout
    for name in ("first", "other", "align"):
        whole, killed = (RunFolder(Path("runs") / root / name) for root in ("whole", "chain"))
        assert [line["loss"] for line in killed.read_metrics()] == [line["loss"] for line in whole.read_metrics()]
    assert not list(run.glob("*.1"))
