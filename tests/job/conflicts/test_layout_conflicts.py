"""Layouts that cannot be: each is told at the keys that take part, with its reason and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import Problem, UserError
from stoker.job import load_job
from stoker.job.changed_keys import differences, with_effect
from stoker.job.document.job_to_yaml import dump_job

SFT = "task: sft\nmodel: smollm2-135m\ndata: my.jsonl\n"
MODULE = "task: module\nmodule: {model: 'a:b', loss: 'a:b', data: 'a:b'}\n"
QUANTISED = "task: sft\nmodel: {name: m, quantise: 8bit}\ndata: x\ntune: lora\n"

# (head of the job, its `parallel` and `train` lines, keys at which it is told, part of the message, of the suggestion)
IMPOSSIBLE = [
    (SFT, "parallel: {data: 4, shard: zero3, shard_size: 3}", ["shard_size", "data"],
     "`shard_size: 3` does not divide `data: 4`", "write 4, or `data: 6`"),
    (SFT, "parallel: {data: 4, shard_size: 2}", ["shard_size"], "no effect without `shard`", "`shard: zero3`"),
    (SFT, "parallel: {data: 4, shard: zero3, shard_size: 1}", ["shard_size", "shard"],
     "leaves nothing to shard", "write 2 or 4"),
    (SFT, "parallel: {shard: zero2}", ["shard"], "data-parallel processes, and there is one", "write `data: 2`"),
    (SFT, "parallel: {data: 1, shard: zero2, tensor: 2}", ["shard", "data"], "there is one", "write `data: 2`"),
    (SFT, "parallel: {data: 2, sequence: true}", ["sequence"], "no effect without `tensor`", "write `tensor: 2`"),
    (SFT, "parallel: {async_tensor: true}\ntrain: {compile: true}", ["async_tensor"],
     "no effect without `tensor`", "write `tensor: 2`"),
    (SFT, "parallel: {tensor: 2, async_tensor: true}", ["async_tensor"],
     "blocks are not compiled", "also write `compile: true`"),
    (SFT, "parallel: {tensor: 2, sequence: false, async_tensor: true}\ntrain: {compile: true}",
     ["sequence", "async_tensor"], "overlaps the collectives of `sequence`", "remove one of them"),
    (SFT, "parallel: {tensor: 2, async_tensor: true}\ntrain: {compile: true, float8: rowwise}",
     ["train.float8", "async_tensor"], "for products in 16 or 32 bits", "write `float8: none`"),
    (SFT, "parallel: {schedule: 1f1b}", ["schedule"], "no effect without `pipeline`", "write `pipeline: 2`"),
    (SFT, "parallel: {stages: [4, 4]}", ["stages"], "no effect without `pipeline`", "write `pipeline: 2`"),
    (SFT, "parallel: {context_by: ulysses}", ["context_by"], "no effect without `context`", "write `context: 2`"),
    (SFT, "parallel: {pipeline: 2, stages: [1, 2, 3]}", ["stages", "pipeline"],
     "`stages` has 3 numbers, and `pipeline: 2` with `1f1b` has 2 stages", "each of the 2 stages"),
    (SFT, "parallel: {pipeline: 2, schedule: zbv, stages: [4, 4]}", ["stages", "pipeline", "schedule"],
     "has 4 stages (2 a process)", "each of the 4 stages"),
    (SFT, "parallel: {pipeline: 4}\ntrain: {batch: 8, accumulation: 2}",
     ["train.batch", "train.accumulation", "pipeline"], "needs at least 4 micro-batches", "accumulation 4"),
    (SFT, "parallel: {pipeline: 4}\ntrain: {batch: 2}", ["train.batch", "pipeline"],
     "needs at least 4 micro-batches", "write batch 4 with accumulation 4"),
    (SFT, "parallel: {pipeline: 2, schedule: interleaved}\ntrain: {accumulation: 7}",
     ["train.accumulation", "pipeline", "schedule"], "equal rounds of 2 or more", "write accumulation 1"),
    (SFT, "parallel: {pipeline: 2, schedule: zero-bubble, recompute: full}", ["schedule", "recompute"],
     "backward pass of a block in two halves", "write `schedule: interleaved`"),
    (SFT, "parallel: {pipeline: 2, schedule: zbv}\ntrain: {compile: true}", ["schedule", "train.compile"],
     "a compiled block has one backward pass", "or `compile: false`"),
    (SFT, "parallel: {data: 2, shard: zero2, offload: params}", ["offload", "shard"],
     "`shard: zero2` always keeps them on the device", "write `shard: zero3`"),
    (SFT, "parallel: {pipeline: 2, offload: activations}\ntrain: {accumulation: 2}", ["offload", "pipeline"],
     "several micro-batches in flight", "or remove `pipeline`"),
    (SFT, "parallel: {offload: params}", ["offload"], "`offload: params`", "or use `offload: optimizer`"),
    (SFT, "parallel: {tensor: 2, expert: 4}", ["expert", "tensor"],
     "experts are spread over its processes", "write `tensor: 4`"),
    (SFT, "parallel: {devices: [0, 1, 0]}", ["devices[2]"], "names 0 twice", "once"),
    (SFT, "parallel: {devices: [0, 1, 2], data: 2}", ["devices", "data"],
     "lists 3, but data x tensor x pipeline x context = 2 x 1 x 1 x 1 is 2", "name 2 devices, or write `data: 3`"),
    (SFT, "parallel: {devices: [0, 1, 2], tensor: 2}", ["devices", "tensor"],
     "not a multiple of tensor x pipeline x context = 2", "name 2 or 4 devices"),
    (SFT, "parallel: {devices: [0, 1, 2]}\ntrain: {batch: 8}", ["train.batch", "devices"],
     "batch 8 is not a multiple of data-parallel 3", "batch 6 or 9"),
    (MODULE, "parallel: {tensor: 2}", ["tensor"], "`tensor: 2` needs a family's facts", "write `data: 2`"),
    (MODULE, "parallel: {pipeline: 2}", ["pipeline"], "`task: module` has none", "`shard: zero3`"),
    (MODULE, "parallel: {context: 4}", ["context"], "`task: module` has none", "write `data: 4`"),
    (QUANTISED, "parallel: {tensor: 2}", ["model.quantise", "tune.method", "tensor"],
     "a quantised base", "`tune: lora` on a base that is not quantised"),
    (SFT + "tune: qlora\n", "parallel: {pipeline: 2}", ["tune.method", "pipeline"], "a quantised base", "`data`"),
    (SFT + "tune: qlora\n", "parallel: {data: 2, shard: zero3, offload: params}", ["tune.method", "offload"],
     "a quantised base does not support", "`offload: optimizer`"),
    (SFT + "tune: qlora\n", "train: {precision: fp64}", ["tune.method", "train.precision"],
     "quantised", "`tune: lora`"),
    (SFT, "parallel: {tensor: 2}\ntrain: {optimizer: adafactor}", ["train.optimizer", "tensor"],
     "whole rows and columns, and `tensor` gives a process a part", "write `optimizer: adamw`"),
    (SFT, "parallel: {data: 2, shard: zero1}\ntrain: {optimizer: adafactor}", ["train.optimizer", "shard"],
     "`shard` gives a process a part", "or remove `shard`"),
    (SFT, "parallel: {tensor: 2}\ntrain: {optimizer: muon}", ["train.optimizer", "tensor"],
     "orthogonalises whole matrices", "write `optimizer: adamw`"),
    (SFT, "train: {optimizer: sgd, optimizer_states: bf16}", ["train.optimizer", "train.optimizer_states"],
     "AdamW's moments", "write `optimizer: adamw`"),
    (SFT, "train: {optimizer: sgd, beta1: 0.5, eps: 1e-6}", ["train.eps"],
     "`train.eps` has no effect with `optimizer: sgd`", "write `optimizer: adamw`"),
    (SFT, "train: {optimizer: adafactor, beta2: 0.9}", ["train.beta2"],
     "`train.beta2` has no effect with `optimizer: adafactor`", "remove it"),
    (SFT, "train: {schedule: constant, min_lr: 0.1}", ["train.min_lr"],
     "no effect with `schedule: constant`", "write `schedule: cosine`"),
    (SFT, "train: {precision: fp64, optimizer_states: bf16}", ["train.optimizer_states", "train.precision"],
     "rounds AdamW's moments", "remove `optimizer_states`"),
    (SFT + "tune: lora\n", "train: {optimizer_states: 8bit}", ["train.optimizer_states", "tune.method"],
     "rows in blocks of 64", "write `optimizer_states: bf16`"),
    (SFT, "parallel: {offload: optimizer}\ntrain: {optimizer: muon}", ["train.optimizer", "offload"],
     "steps on the host", "`offload: none`"),
    (SFT + "tune: lora\n", "train: {optimizer: muon}", ["tune.method", "train.optimizer"],
     "trains none", "`optimizer: adamw`"),
    (SFT + "tune: {method: lora, dora: true}\n", "parallel: {tensor: 2}", ["tune.dora", "tensor"],
     "norms of whole columns", "write `dora: false`"),
    (SFT, "parallel: {pipeline: 2}\ntrain: {precision: fp16}", ["train.precision", "pipeline"],
     "scales the loss", "write `precision: bf16`"),
    (SFT, "parallel: {data: 2, shard: zero3, offload: params}\ntrain: {precision: fp16}",
     ["train.precision", "offload"], "gradients on the host", "another `offload`"),
    (SFT, "parallel: {data: 2, compress: powersgd}\ntrain: {precision: fp16}",
     ["train.precision", "compress"], "errors of one scale", "another `compress`"),
    ("task: dpo\nmodel: {name: m, quantise: 8bit}\ndata: x\n", "tune: lora", ["model.quantise"],
     "rounds activations", "write `quantise: 4bit`"),
    ("task: grpo\nmodel: {name: m, quantise: 8bit}\ndata: x\ntune: lora\n", "grpo: {rewards: numeric}",
     ["model.quantise"], "rounds activations", "write `quantise: 4bit`"),
    (SFT, "evaluate: {samples: 2, fraction: 0}", ["evaluate.samples", "evaluate.fraction"],
     "nothing is held out", "remove `fraction: 0`"),
    (MODULE, "train: {router_aux_loss: 0.1}", ["train.router_aux_loss"], "no effect in `task: module`", "remove it"),
    (SFT, "tune: {method: prefix, projection: false, width: 8}", ["tune.width", "tune.projection"], "has no network",
     "remove one"),
    (SFT, "faults: {window: 16}", ["faults.window"], "no effect without `spike`", "spike: 10"),
    (SFT, "evaluate: {data: [{path: x, weight: 2}]}", ["evaluate.data[0].weight"], "no effect in `evaluate.data`", ""),
    (SFT, "evaluate: {data: [{path: x, stream: true}]}", ["evaluate.data[0].stream"], "no effect in `evaluate", ""),
    ("task: ranking\ndata: x.csv\n", "ranking: {label: y, table: {dtype: int8}}\ntrain: {precision: fp64}",
     ["ranking.table.dtype", "train.precision"], "has rows of float64", "remove one"),
    ("task: ranking\ndata: x.csv\n", "ranking: {label: y, features: {x: {buckets: 2}}}", ["ranking.features"],
     "must be a list, not a block", "`- name: ...`"),
    (MODULE, "evaluate: {fraction: 0.2}", ["evaluate.fraction"], "a dataset of its own", "in `module.evaluate`"),
    (MODULE, "evaluate: {rows: 10}", ["evaluate.rows"], "evaluates all samples", "remove it"),
    (MODULE, "evaluate: {samples: 2}", ["evaluate.samples"], "no effect in `task: module`", "remove it"),
    (SFT, "parallel: {tensor: 0, shard_size: 3, context_by: ring}", ["tensor", "shard_size", "context_by"], "", ""),
    (SFT, "parallel: {devices: []}", ["devices"], "is empty", "write at least one item"),
    (SFT, "parallel: {devices: [0, -1]}", ["devices[1]"], "must be a whole number of at least 0, not -1", ""),
    (SFT, "parallel: {devices: 2}", ["devices"], "must be a list of whole numbers", "write [2] or auto"),
    (SFT, "parallel: {devices: '0,1'}", ["devices"], "must be a list of whole numbers", "write [0,1] or auto"),
    (SFT, "parallel: {data: 2, shard: 3}", ["shard"], "one of none, zero1, zero2, zero3, not 3", "write zero3"),
    (SFT, "parallel: {pipeline: 2, schedule: Interleaved1F1B}", ["schedule"], "one of gpipe", "write interleaved"),
    (SFT, "parallel: {tp: 2}", ["tp"], "unknown key `parallel.tp`", "write `tensor`"),
    (SFT, "parallel: everything", [""], "`parallel` must be a block", "indented below it"),
]  # fmt: skip


def problems_of(folder: Path, text: str) -> list[Problem]:
    path = folder / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_job(path)
    return list(caught.value.problems)


@pytest.mark.parametrize(("head", "text", "keys", "message", "suggestion"), IMPOSSIBLE)
def test_an_impossible_layout_is_told_at_every_key_that_takes_part(
    tmp_path: Path, head: str, text: str, keys: list[str], message: str, suggestion: str
) -> None:
    found = problems_of(tmp_path, f"{head}{text}\n")
    told = {problem.key for problem in found}
    assert told == {key if "." in key else f"parallel.{key}".rstrip(".") for key in keys}, found
    assert all(problem.line and problem.column for problem in found)
    assert any(message in problem.message and suggestion in problem.suggestion for problem in found), found


def test_a_runs_own_job_may_have_keys_without_effect_that_an_earlier_version_recorded(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    recorded = "train: {optimizer: sgd, schedule: constant, beta1: 0.9, beta2: 0.999, eps: 1e-8, min_lr: 0.2}\n"
    assert {problem.key for problem in problems_of(tmp_path, SFT + recorded)} == {
        "train.beta2", "train.eps", "train.min_lr"
    }  # fmt: skip
    (tmp_path / "events.jsonl").touch()
    assert load_job(path).job.train.optimizer == "sgd"
    path.write_text(SFT + "parallel: {compile: true, data: 2}\ntrain: {compile: true}\n")
    assert load_job(path).job.parallel.data == 2
    with pytest.raises(UserError, match="write `compile` under"):
        load_job(path, ["parallel.compile=true"])
    path.write_text(SFT + recorded)
    with pytest.raises(UserError, match="no effect with `optimizer: sgd`"):
        load_job(path, ["train.eps=1e-6"])


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (SFT, "tune: {method: prefix, projection: false, width: 8}"),
        (SFT, "faults: {window: 16}"),
        (SFT, "evaluate: {data: [{path: x, weight: 2, stream: true}]}"),
        ("task: ranking\ndata: x.csv\n", "ranking: {label: y, table: {dtype: int8}}\ntrain: {precision: fp64}"),
        (MODULE, "evaluate: {fraction: 0.2, rows: 10}"),
    ],
)
def test_a_run_with_keys_without_effect_resumes_without_them(tmp_path: Path, head: str, text: str) -> None:
    """Its recorded job is read, and does not differ from the job once the keys are removed."""
    assert problems_of(tmp_path, f"{head}{text}\n")
    (tmp_path / "events.jsonl").touch()
    recorded = load_job(tmp_path / "job.yaml").job
    dumped = tmp_path / "mine" / "job.yaml"
    dumped.parent.mkdir()
    dumped.write_text(dump_job(recorded))
    assert differences(*with_effect(recorded, load_job(dumped).job)) == []


@pytest.mark.parametrize(
    "text",
    [
        SFT + "parallel: {shard_size: 1, sequence: false, expert: 1}\n",
        SFT + "parallel: {data: 4, shard: zero3, shard_size: 2, offload: params, recompute: full}\n",
        SFT + "parallel: {context: 2, shard: zero3, shard_size: 1}\n",
        SFT + "parallel: {data: 2, tensor: 2, expert: 2, offload: optimizer}\n",
        SFT + "parallel: {pipeline: 2, schedule: gpipe, recompute: full}\ntrain: {compile: true}\n",
        SFT + "parallel: {pipeline: 2, schedule: zbv, stages: [1, 2, 3, 2]}\ntrain: {batch: 8, accumulation: 1}\n",
        SFT + "parallel: {data: 2, pipeline: 2}\ntrain: {optimizer: adafactor, precision: fp64}\n",
        SFT + "tune: {method: lora, dora: true}\nparallel: {data: 2, shard: zero3, pipeline: 2}\n",
        SFT + "tune: qlora\nparallel: {data: 2, context: 2}\nevaluate: {samples: 3}\n",
        MODULE + "parallel: {data: 2, shard: zero3, recompute: full, offload: params, devices: [1, 0]}\n",
        "task: pretrain\nmodel: llama-10m\ndata: sotu\nparallel: {data: 2, tensor: 2, pipeline: 2, context: 2}\n",
    ],
)
def test_what_can_stand_together_does(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert load_job(path).job.parallel
