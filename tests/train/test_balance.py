"""The routers' auxiliary loss in whole runs: in every layout that of one process. Its value: `test_router_balance`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stoker.cli.preflight import open_job
from stoker.errors import UserError
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.evaluate import evaluate
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.run import train_run

EXPERTS, CHOSEN, WEIGHT = 5, 2, 0.5  # five experts divide by no number of processes; the weight is one that is felt
LAYOUTS = [
    (1, ("train.micro_batch=4",)),
    (1, ("train.pack=true", "train.seq_len=128", "train.batch=2", "train.micro_batch=1")),
    (1, ("parallel.recompute=full", "train.micro_batch=2")),
    (1, ("parallel.recompute=selective",)),
    (2, ("parallel.data=2",)),
    (2, ("parallel.data=2", "parallel.shard=zero3", "parallel.recompute=full")),
    (2, ("parallel.tensor=2", "parallel.sequence=false")),
    (2, ("parallel.tensor=2",)),
    (2, ("parallel.pipeline=2",)),
    (2, ("parallel.pipeline=2", "parallel.schedule=zbv")),
    (2, ("parallel.context=2",)),
    (2, ("parallel.context=2", "parallel.context_by=ulysses")),
    (4, ("parallel.pipeline=2", "parallel.tensor=2")),
    (4, ("parallel.pipeline=2", "parallel.context=2")),
]
IDS = [" ".join(overrides).replace("parallel.", "").replace("train.", "") for _, overrides in LAYOUTS]
SELDOM = (3, 4, 7, 9, 11, 12)  # exhaustive: the others split the same things


def write_model(like: Path, to: Path) -> None:
    """A small mixture of experts with the tokenizer of the tests, whose routers do not choose all alike."""
    tokenizer = AutoTokenizer.from_pretrained(like)
    tokenizer.save_pretrained(to)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256,
        "num_experts_per_tok": CHOSEN, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "pad_token_id": None, "router_aux_loss_coef": 0.02, "num_local_experts": EXPERTS, "sliding_window": None,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.5)
    model.save_pretrained(to)


def job_of(sft: dict[str, Any], base: Path, **train: Any) -> dict[str, Any]:
    settings = {
        "batch": 4, "micro_batch": 1, "seq_len": 64, "lr": 1e-2, "precision": "fp64", "schedule": "constant",
        "warmup": 0, "router_aux_loss": WEIGHT,
    }  # fmt: skip
    return {**sft, "model": str(base / "moe"), "steps": 3, "train": {**settings, **train}}


@pytest.fixture
def job(sft: dict[str, Any], base: Path) -> Path:
    write_model(Path(sft["model"]), base / "moe")
    write_job(base, job_of(sft, base))
    return base


def run(path: str, overrides: tuple[str, ...], name: str) -> tuple[list[float], list[float]]:
    """The losses and the gradients' norms of each step."""
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"output={name}", *overrides])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / name)
    folder.path.mkdir(exist_ok=True)
    train_run(prepared, folder, base, quiet=True)
    metrics = folder.read_metrics()
    return [line["loss"] for line in metrics], [line["grad_norm"] for line in metrics]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if i in SELDOM else []) for i, case in enumerate(LAYOUTS)],
    ids=IDS,
)
@pytest.mark.often("pipeline=2", "data=2 shard=zero3 recompute=full")
def test_the_auxiliary_loss_under_a_layout_is_that_of_one_process(
    world: int, overrides: tuple[str, ...], job: Path, pool: Pool
) -> None:
    packs = "train.pack=true" in overrides
    # Packed rows hold as many documents as fit: the same rows, then, are compared in one pass and in two.
    alone = run(str(job), (*overrides, "train.micro_batch=2") if packs else (), "one")
    many = pool.run(run, str(job), overrides, "many", world=world)[0] if world > 1 else run(str(job), overrides, "many")
    for ours, theirs in zip(many, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)


def prepared_of(base: Path, *overrides: str) -> Prepared:
    return prepare(load_job(base / "job.yaml", overrides), base)


def test_by_default_it_is_weighted_as_the_model_has_it(job: Path, sft: dict[str, Any]) -> None:
    prepared = prepared_of(job, "train.router_aux_loss=auto")
    assert prepared.task.language is not None and prepared.task.language.balance is not None
    assert prepared.task.language.balance.coefficient == 0.02
    off = prepared_of(job, "train.router_aux_loss=0")
    assert off.task.language is not None and off.task.language.balance is None


def test_a_dense_model_has_none_to_balance(sft: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    path = write_job(base, {**sft, "steps": 3, "train": {"router_aux_loss": WEIGHT}})
    for refuse in (lambda: prepared_of(base), lambda: open_job(str(path), ())):
        with pytest.raises(UserError, match="balances the experts of a mixture") as refused:
            refuse()
        (problem,) = refused.value.problems
        assert (problem.file, problem.key, problem.suggestion) == (str(path), "train.router_aux_loss", "remove it")
        assert (problem.line, problem.column) == (6, 26)
    prepared_of(base, "train.router_aux_loss=0")


def test_the_held_out_loss_is_without_it(job: Path) -> None:
    found = []
    for weight in (0.0, WEIGHT):
        more = ("train.precision=fp32", "evaluate.fraction=0.2")
        prepared = prepared_of(job, f"train.router_aux_loss={weight}", *more)
        evaluation = evaluate(prepared.task, prepared.engine)
        assert evaluation is not None
        found.append(evaluation.loss)
    assert found[0] == found[1]


def test_the_coefficient_changes_the_weights(job: Path) -> None:
    """Else no layout could get it wrong: the loss that is shown is without it, gradients and later losses are not."""
    losses, norms = run(str(job), (), "with")
    plain_losses, plain_norms = run(str(job), ("train.router_aux_loss=0",), "without")
    assert losses[0] == plain_losses[0] and abs(norms[0] - plain_norms[0]) > 1e-3
    assert abs(losses[2] - plain_losses[2]) > 1e-5


def of_pairs(words: int) -> dict[str, Any]:
    return {"task": "dpo", "data": f"pairs{words}.jsonl", "dpo": {"loss": "sigmoid", "beta": 1e-9}}


def of_answers(words: int) -> dict[str, Any]:
    block = {"rewards": "exact", "prompts": 4, "answers": 2, "max_tokens": words, "kl": 0.0}
    return {"task": "grpo", "data": "asked.jsonl", "grpo": block}


@pytest.mark.parametrize("block", [of_pairs, of_answers])
def test_the_length_of_answers_is_no_factor_of_it(block: Any, job: Path, sft: dict[str, Any]) -> None:
    """The losses themselves have no gradient here: beta is next to nothing, and the answers all score alike."""
    prompts = [{"prompt": f"Say {i}", "expected": "nothing that is said"} for i in range(16)]
    (job / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    norms = []
    for words in (2, 32):
        rows = [{"prompt": f"Say {i}", "chosen": f"{i} " * words, "rejected": "a " * words} for i in range(16)]
        (job / f"pairs{words}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = {**job_of(sft, job, batch=8, micro_batch=8, seq_len=128), **block(words), "steps": 1}
        write_job(job, {**made, "evaluate": {"fraction": 0.0}})
        norms += run(str(job), (), f"of {words}")[1]
    assert norms[0] > 1e-3 and 0.5 < norms[1] / norms[0] < 2
