"""New rows first: nothing else changes, in any layout; and such a run goes on where it stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Ran, assert_same_state, run, stop_at
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.errors import UserError
from stoker.job.load_job import load_job
from stoker.job.tokenizer_extension import Extension
from stoker.launch.process_pool import Pool
from stoker.train.optim.lr_schedule import Schedule
from stoker.verify.layout_cases import MATRIX, Cell
from stoker.verify.toy_job import make_twin
from stoker.verify.toy_rows import KNOWN
from stoker.verify.verifier import Verifier

KNOWN_BY_MODEL, FIRST_STEPS = 300, 4


@pytest.fixture
def job(sft: dict[str, Any], base: Path) -> dict[str, Any]:
    """A job whose model has rows for 300 of the 376 tokens of its tokenizer."""
    tokenizer, model = base / "tokenizer", base / "model"
    model.mkdir()
    shutil.copytree(sft["model"], tokenizer, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(Path(sft["model"]) / "tokenizer_config.json", tokenizer)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(sft["model"], vocab_size=KNOWN_BY_MODEL)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    pieces = tuple((i, 2 * i) for i in range(1, 77))
    Extension("old", "", "", KNOWN_BY_MODEL, pieces).write(tokenizer)
    train = {**sft["train"], "schedule": "constant", "weight_decay": 0.1}
    tune = {"method": "full", "new_rows_first": FIRST_STEPS}
    checkpoint = {"every": 1, "keep": 99, "best": False}
    named = {"name": str(model), "tokenizer": str(tokenizer)}
    return {**sft, "model": named, "train": train, "tune": tune, "steps": 8, "checkpoint": checkpoint}


def changed_rows(ran: Ran, name: str, step: int) -> list[int]:
    """Rows of a tensor that are others than a step before."""
    before, after = (ran.store.load(s).tensors[name] for s in (step - 1, step))
    return torch.nonzero((before != after).any(dim=1)).flatten().tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_only_new_rows_change_at_first_then_everything(optimizer: str, job: dict[str, Any], base: Path) -> None:
    ran = run(base, job, f"train.optimizer={optimizer}")
    name = "model/model.embed_tokens.weight"
    for step in range(2, FIRST_STEPS + 1):
        assert changed_rows(ran, name, step) and min(changed_rows(ran, name, step)) >= KNOWN_BY_MODEL
    one, last = (ran.store.load(s) for s in (1, FIRST_STEPS))
    assert {n for n in last.tensors if n.startswith("optimizer/")} == {
        n for n in last.tensors if n.startswith("optimizer/model.embed_tokens.weight/")
    }
    for key, tensor in one.tensors.items():
        if key.startswith("model/") and key != name:
            assert torch.equal(tensor, last.tensors[key]), key
    assert min(changed_rows(ran, name, FIRST_STEPS + 1)) < KNOWN_BY_MODEL
    end = ran.last_state().tensors
    assert not torch.equal(end["model/model.norm.weight"], last.tensors["model/model.norm.weight"])
    if optimizer == "adamw":  # fresh moments for all
        assert {float(t) for n, t in end.items() if n.endswith("/step")} == {8 - FIRST_STEPS}


@pytest.mark.parametrize("stop", [2, FIRST_STEPS, FIRST_STEPS + 1])
@pytest.mark.slow
def test_a_run_resumed_in_the_warmup_equals_an_uninterrupted_one(stop: int, job: dict[str, Any], base: Path) -> None:
    whole = run(base, job, "output=whole")
    first = run(base, job, before=stop_at(4 * stop - 1))
    assert first.outcome.state == "stopped" and first.outcome.step == stop
    assert_same_state(run(base, job).last_state(), whole.last_state())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gptj"])
@pytest.mark.often("gptj")
def test_layouts_compute_what_one_process_does(family: str, pool: Pool, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, tie_word_embeddings=family == "llama")
    text = "task: pretrain\nmodel: some/model\ndata: none.jsonl\nsteps: 4\ntune: {method: full, new_rows_first: 100}\n"
    (tmp_path / "job.yaml").write_text(text)
    twin = make_twin(load_job(tmp_path / "job.yaml"), tmp_path, tmp_path, steps=4, config=config)
    names = ("DDP", "zero2", "zero3", "tensor 2 + sequence", "1f1b") if family == "llama" else ("zero3", "tensor 2")
    cells = [cell for cell in MATRIX if cell.name in names]
    if family == "llama":
        cells.append(Cell("offload", {"data": 2, "shard": "zero2", "offload": "optimizer"}))
    verifier = Verifier(twin, pool, whole=False)
    verdicts = list(map(verifier.verdict, cells))
    assert [v.reason for v in verdicts if v.passed is not True] == []
    (reference, *_) = (found.trace for found in verifier.references.values())
    moved = [key for key in reference.gradients if key[0] == 1]
    assert len(moved) == (1 if family == "llama" else 3)  # the embedding; and the head with its bias
    for name in moved:
        assert not reference.gradients[name][:KNOWN].any() and reference.gradients[name][KNOWN:].any()


def test_without_new_tokens_there_is_nothing_to_train_first(sft: dict[str, Any], base: Path) -> None:
    with pytest.raises(UserError, match="the model has a row for every token"):
        run(base, {**sft, "tune": {"method": "full", "new_rows_first": 3}})


def test_each_stage_warms_up() -> None:
    schedule = Schedule(1.0, 12, 4, "linear", first=8)
    assert [schedule.lr(step) for step in range(1, 9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    plain = Schedule(1.0, 12, 4, "linear")
    assert [schedule.lr(step) for step in range(9, 21)] == [plain.lr(step) for step in range(1, 13)]
