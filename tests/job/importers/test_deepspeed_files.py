"""DeepSpeed's files, alone and named by another's."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import DEEPSPEED, LLAMA_FACTORY, ZERO3, checked, lost, why, written

from stoker.errors import UserError
from stoker.job.importers import import_files


def test_a_deepspeed_file_that_is_named_is_read_with_it() -> None:
    Path("ds").mkdir()
    written(ZERO3, "ds/z3.json")
    given = written(LLAMA_FACTORY, deepspeed="ds/z3.json")
    job = checked(import_files([given], processes=8)).job
    assert (job.parallel.shard, job.parallel.data, job.train.batch) == ("zero3", 8, 64)
    unsaid = import_files([given])
    assert checked(unsaid).job.parallel.shard == "none"
    assert "  # shard: zero3  # the number of processes is not stated" in unsaid.text
    assert lost(unsaid) == {"zero_optimization.stage"}
    assert checked(import_files([written(LLAMA_FACTORY, deepspeed="{}")])).job.parallel.shard == "none"
    missing = import_files([written(LLAMA_FACTORY, deepspeed="no.json")])
    assert "there is no such file" in why(missing, "deepspeed")


def test_deepspeed_alone_says_how_and_not_what() -> None:
    imported = import_files([written(DEEPSPEED, "ds.json")])
    job = checked(imported).job
    assert imported.missing == ("task", "model", "data")
    assert "EXAMPLE VALUES" in imported.text
    parts, train = job.parallel, job.train
    assert (parts.data, parts.shard, parts.offload) == (8, "zero3", "params")
    assert (train.batch, train.micro_batch, train.accumulation, train.clip) == (64, 4, 2, 0.5)
    assert (train.lr, train.beta1, train.beta2, train.eps, train.weight_decay) == (3e-5, 0.8, 0.95, 1e-7, 3e-7)
    assert (train.schedule, train.warmup, train.min_lr, train.precision, job.steps) == (
        "cosine",
        100,
        0.1,
        "bf16",
        5000,
    )
    said = import_files(["ds.json"], overrides=["task=pretrain", "model=org/m", "data=mine.txt", "train.lr=1e-5"])
    assert said.missing == ()
    assert (checked(said).job.data[0].path, checked(said).job.train.lr) == ("mine.txt", 1e-5)


@pytest.mark.parametrize(("stage", "shard"), [(0, "none"), (1, "zero1"), (2, "zero2"), (3, "zero3")])
def test_zero_stages(stage: int, shard: str) -> None:
    given = written({"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1}, "ds.json")
    assert checked(import_files([given], processes=2)).job.parallel.shard == shard
    with pytest.raises(UserError, match=r"ds.json:1:15: `optimizer` must be a block of keys, not 'Adam'"):
        import_files([written('{"optimizer": "Adam"}', "ds.json")], format="deepspeed")
    with pytest.raises(UserError, match="there is no ZeRO stage 4"):
        import_files([written({"zero_optimization": {"stage": 4}}, "ds.json")])


def test_what_deepspeed_has_and_stoker_not() -> None:
    text = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}, "zero_quantized_gradients": True},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}},
    }
    imported = import_files([written(text, "ds.json")], processes=2)
    checked(imported)
    assert lost(imported) == {
        "zero_optimization.offload_optimizer.device", "zero_optimization.zero_quantized_gradients", "scheduler.type",
        "optimizer.type",
    }  # fmt: skip


def test_deepspeed_s_scheduler_and_optimizer_win_as_they_do_there() -> None:
    plan = {**ZERO3, "scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "SGD", "params": {}}}
    written(plan, "z3.json")
    imported = import_files([written(LLAMA_FACTORY, deepspeed="z3.json")], processes=8)
    train = checked(imported).job.train
    assert (train.schedule, train.optimizer, train.beta1) == ("constant", "sgd", 0.0)
    assert "scheduler.type of DeepSpeed wins" in why(imported, "lr_scheduler_type")
