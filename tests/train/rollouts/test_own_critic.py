"""A critic that is a model of its own, a reward run or another model: in one process and in layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import assert_same_state, run, write_job, write_rows
from test_policy_layouts import check_alike, trained
from tokenizers import Tokenizer

from stoker.checkpoint.load_run import open_run
from stoker.cli.main import main
from stoker.errors import UserError
from stoker.launch.process_pool import Pool
from stoker.models.tuning.adapters import unwrap
from stoker.train.preference.reward_objective import offset_of
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles
from tiny_llama import save_tiny_llama

LORA = {"method": "lora", "rank": 4}


def reward_run(base: Path, job: dict[str, Any], tune: Any = "full", **keys: Any) -> None:
    """A trained run of task reward on the job's model, in the folder rm."""
    with (base / "pairs.jsonl").open("w") as file:
        for i in range(24):
            answers = {"chosen": f"eee {i} e", "rejected": f"It is {i}."}
            file.write(json.dumps({"prompt": f"Say {i} words about the sea", **answers}) + "\n")
    shared = {key: job[key] for key in ("model", "train")}
    reward = {**shared, "task": "reward", "data": "pairs.jsonl", "steps": 6, "output": "rm", "tune": tune, **keys}
    run(base, {**reward, "evaluate": {"fraction": 0.2, "every": 3}})


@pytest.mark.parametrize("tune", ["full", LORA], ids=["full", "lora"])
def test_a_critic_begins_as_the_reward_run_whatever_the_policy_tunes(
    ppo: dict[str, Any], base: Path, tune: Any
) -> None:
    reward_run(base, ppo, tune)
    ran = run(base, {**ppo, "tune": "full", "steps": 1, "ppo": {**ppo["ppo"], "critic": "rm"}})
    assert re.match(r"rm: [\d,]{5,7} parameters, ", ran.prepared.facts["critic"])
    reward = open_run("rm", base)
    model, offset = unwrap(reward.model), offset_of(reward.model)
    assert offset != 0.0
    rollout = RolloutFiles(ran.folder.path / ROLLOUTS).read(0).rollouts[0]
    ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.answer_ids.tolist()]])
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, :, 0] - offset
    np.testing.assert_allclose(rollout.tokens["value"], scores[len(rollout.prompt_ids) - 1 : -1], atol=1e-5)


def test_the_policy_and_its_critic_share_nothing(ppo: dict[str, Any], base: Path, wide: Path) -> None:
    """With `critic_warmup` only the critic moves, whatever else moves a policy; its ratio begins at 1 in all passes."""
    block = {**ppo["ppo"], "critic": str(wide), "critic_warmup": 1}
    write_rows(base / "beside.jsonl", 12)
    warm = {**block, "ptx": {"data": "beside.jsonl"}}
    ran = run(base, {**ppo, "steps": 3, "ppo": warm, "train": {**ppo["train"], "weight_decay": 0.1}})
    before, after = (ran.store.load(step).tensors for step in (1, 2))
    moved = {
        name for name, tensor in after.items() if name.startswith("model/") and not torch.equal(before[name], tensor)
    }
    assert moved and all(name.startswith("model/critic_model.") for name in moved)
    assert sum(name.startswith("model/critic_model.") for name in after) == len(moved)
    lines = run(base, {**ppo, "steps": 2, "output": "both", "ppo": {**block, "critic_warmup": 0}}).folder.read_metrics()
    assert lines[0]["ratio"] == pytest.approx(1.0, abs=1e-5) and lines[0]["value_loss"] > 0


def test_a_run_goes_on_from_the_warm_up_of_a_shared_critic_to_the_bit(ppo: dict[str, Any], base: Path) -> None:
    train = {**ppo["train"], "weight_decay": 0.1}
    job = {**ppo, "tune": LORA, "train": train, "steps": 4, "ppo": {**ppo["ppo"], "critic_warmup": 1}}
    whole = run(base, {**job, "output": "whole"})
    before, warm, after = (whole.store.load(step).tensors for step in (1, 2, 4))
    for name in (name for name in before if name.startswith("model/")):
        of_critic = ".critic." in name or "value_head" in name
        assert torch.equal(before[name], warm[name]) != of_critic and not torch.equal(warm[name], after[name]), name
    run(base, {**job, "output": "parts", "steps": 3})
    rest = run(base, {**job, "output": "parts"})
    assert rest.losses == whole.losses
    assert_same_state(rest.last_state(), whole.last_state())


def test_a_critic_learns_with_a_rate_of_its_own(ppo: dict[str, Any], base: Path, wide: Path) -> None:
    ran = run(base, {**ppo, "steps": 1, "ppo": {**ppo["ppo"], "critic": str(wide), "critic_lr": 3e-5}})
    groups = ran.loop.optimizer.param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in ran.prepared.task.model.named_parameters():
        expected = 3e-5 if name.startswith("critic_model.") else 3e-3
        assert rates[id(parameter)] == pytest.approx(expected), name


@pytest.mark.parametrize(
    "tune", ["full", pytest.param(LORA, marks=pytest.mark.exhaustive)], ids=["full", "lora"]
)  # three runs each
@pytest.mark.slow
def test_a_run_with_its_own_critic_goes_on_to_the_bit(ppo: dict[str, Any], base: Path, wide: Path, tune: Any) -> None:
    """It is stopped in the middle of an iteration, which has four steps."""
    job = {**ppo, "tune": tune, "train": {**ppo["train"], "batch": 4}, "ppo": {**ppo["ppo"], "critic": str(wide)}}
    whole = run(base, {**job, "output": "whole"})
    run(base, {**job, "output": "parts", "steps": 3})
    rest = run(base, {**job, "output": "parts"})
    assert rest.losses == whole.losses
    assert_same_state(rest.last_state(), whole.last_state())


def test_the_policy_alone_is_opened_and_exported(
    ppo: dict[str, Any], base: Path, wide: Path, monkeypatch: pytest.MonkeyPatch, in_process_replay: None
) -> None:
    train = {**ppo["train"], "average": 0.5}
    ran = run(base, {**ppo, "steps": 2, "train": train, "ppo": {**ppo["ppo"], "critic": str(wide)}})
    monkeypatch.chdir(base)
    assert main(["export", "run", "--format", "merged", "--to", "merged"]) == 0
    from safetensors import safe_open

    with safe_open(base / "merged/model.safetensors", "np") as tensors:
        names = list(tensors.keys())
        assert names and not any("critic" in name for name in names)
    for at in ("last", "average"):
        opened = dict(open_run("run", base, at=at).model.named_parameters())
        assert opened.keys() == {n for n, _ in ran.prepared.task.model.named_parameters() if "critic" not in n}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ppo": {"critic": "sft"}}, "sft is a run of task sft, whose model gives no scores"),
        ({"ppo": {"critic": "other"}}, "the critic other has another tokenizer than the policy"),
        ({"ppo": {"critic": "nothing"}}, "there is no run nothing"),
        ({"ppo": {"critic": "short"}, "train": {}}, r"rows have up to \d+ tokens, and short was built for 32"),
        ({"ppo": {"critic_lr": 1e-4}}, "a shared critic learns with the policy's rate"),
        ({"ppo": {"critic": "other"}, "tune": {"method": "qlora"}}, "beside a quantised policy"),
    ],
)
def test_wrong_critics_are_refused_at_their_key(
    ppo: dict[str, Any], base: Path, sft: dict[str, Any], tokenizer: Tokenizer, change: dict[str, Any], message: str
) -> None:
    if change["ppo"].get("critic") == "sft":
        run(base, {**sft, "steps": 1, "output": "sft"})
    if change["ppo"].get("critic") == "other":
        other = Tokenizer.from_str(tokenizer.to_str())
        other.add_tokens(["another"])
        save_tiny_llama(base / "other", other, template=None)
    if change["ppo"].get("critic") == "short":
        save_tiny_llama(base / "short", tokenizer, template=None, max_position_embeddings=32)
    with pytest.raises(UserError, match=message) as error:
        run(base, {**ppo, **change, "ppo": {**ppo["ppo"], **change["ppo"]}})
    assert error.value.problems[0].line


WARM_UP = ("ppo.critic_warmup=1", "train.weight_decay=0.1")
LAYOUTS = {
    "DDP": (2, ("parallel.data=2",)),
    "zero1": (2, ("parallel.data=2", "parallel.shard=zero1")),
    "zero2": (2, ("parallel.data=2", "parallel.shard=zero2")),
    "zero3": (2, ("parallel.data=2", "parallel.shard=zero3")),
    "tensor": (2, ("parallel.tensor=2", "parallel.sequence=false")),
    "tensor + sequence": (2, ("parallel.tensor=2", "parallel.sequence=true")),
    "zero3 + tensor": (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2")),
    "zero2, two copies": (4, ("parallel.data=4", "parallel.shard=zero2", "parallel.shard_size=2")),
    "zero3, idle memory offloaded": (2, ("parallel.data=2", "parallel.shard=zero3", "ppo.offload_idle=true")),
    "zero3, LoRA": (2, ("parallel.data=2", "parallel.shard=zero3", "tune.method=lora", "tune.rank=4")),
    "zero3, warm-up": (2, ("parallel.data=2", "parallel.shard=zero3", *WARM_UP)),
    "DDP, warm-up": (2, ("parallel.data=2", *WARM_UP)),
}
OFTEN = ("zero3",)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
@pytest.mark.slow
def test_a_policy_and_its_own_critic_under_a_layout_are_those_of_one_process(
    name: str, ppo: dict[str, Any], base: Path, wide: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, overrides = LAYOUTS[name]
    train = {**ppo["train"], "precision": "fp64", "micro_batch": 1}
    block = {**ppo["ppo"], "critic": str(wide), "critic_lr": 1e-3}
    write_job(base, {**ppo, "steps": 3, "train": train, "ppo": block})
    monkeypatch.syspath_prepend(str(base))
    trained(str(base), "alone", tuple(o for o in overrides if o.startswith("tune") or o in WARM_UP))
    pool.run(trained, str(base), "spread", overrides, world=world, timeout=250)
    check_alike(
        base, 3, ("loss", "score", "kl", "ratio", "clip_fraction", "value_loss", "explained_variance", "grad_norm")
    )
