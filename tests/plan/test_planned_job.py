"""What the planner takes from a job (the model that would be built, the batch, the arithmetic), and a layout back."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.detect_machine import this_processor
from stoker.job.blocks.model_block import ModelBlock
from stoker.job.document.job_to_yaml import scalar
from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import LoadedJob, load_job
from stoker.job.scratch_sizes import SCRATCH
from stoker.job.task_spec import TASKS, WorkSpec
from stoker.models.load_model import meta_model
from stoker.plan.memory.memory_formulas import stage_memory
from stoker.plan.planned_job import parallel_block, setting_of_job, shape_of_name, software_of_job, work_of
from stoker.plan.search import search
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.software import Software
from stoker.plan.time.step_time import step_time
from stoker.train.optim.eight_bit_states import BYTES

TINY = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": True,
}  # fmt: skip


def job(folder: Path, **changes: Any) -> LoadedJob:
    (folder / "tiny").mkdir(exist_ok=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    values = {"task": "sft", "model": "tiny", "data": "rows.jsonl", **changes}
    path = folder / "job.yaml"
    path.write_text("".join(f"{key}: {scalar(value)}\n" for key, value in values.items()))
    return load_job(path)


@pytest.mark.parametrize("name", sorted(SCRATCH))
def test_a_scratch_model_has_as_many_parameters_as_the_one_that_is_built(name: str, tmp_path: Path) -> None:
    built = meta_model(ModelBlock(name=name), tmp_path)
    assert shape_of_name(name, tmp_path).parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(("known", "rows"), [(300, 320), (200, 300)])
def test_special_tokens_that_the_model_has_no_row_for_are_counted(known: int, rows: int, tmp_path: Path) -> None:
    """`stoker.models.resize_embeddings` enlarges embeddings to multiples of 64, and only where they are full."""
    tokens = {"special_tokens": ["<a>", "<b>", "t7"], "name": "tiny"}
    (tmp_path / "tiny").mkdir()
    content = {"added_tokens": [], "model": {"vocab": {f"t{i}": i for i in range(known)}}}
    (tmp_path / "tiny" / "tokenizer.json").write_text(json.dumps(content))
    assert work_of(job(tmp_path, model=tokens), base=tmp_path).shape.vocabulary == rows


def test_a_gguf_file_has_the_shape_of_its_model(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    writer.add_block_count(4)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.zeros((300, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    job(tmp_path)
    as_folder = shape_of_name("tiny", tmp_path)
    assert replace(shape_of_name("tiny.gguf", tmp_path), name=as_folder.name) == as_folder


def test_an_array_beyond_the_end_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    array = struct.pack("<Q1sIIQ", 1, b"x", 9, 0, 100_000)  # bytes, of which the file has two
    (tmp_path / "cut.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + array + b"ab")
    with pytest.raises(UserError, match="the file ends too early"):
        shape_of_name("cut.gguf", tmp_path)


def test_work_is_what_the_job_says(tmp_path: Path) -> None:
    loaded = job(tmp_path, train={"batch": 24, "seq_len": 64}, tune={"method": "lora", "rank": 4})
    work = work_of(loaded, base=tmp_path)
    assert (work.seq_len, work.global_batch, work.tuning, work.rank) == (64, 24, "lora", 4)
    assert work.shape.vocabulary == 300


def test_precision_is_that_of_the_devices(tmp_path: Path) -> None:
    loaded = job(tmp_path)
    assert work_of(loaded, load_cluster("H100"), base=tmp_path).precision == "bf16"
    assert work_of(loaded, load_cluster("V100"), base=tmp_path).precision == "fp16"
    given = job(tmp_path, train={"precision": "fp32"})
    assert work_of(given, load_cluster("H100"), base=tmp_path).precision == "fp32"


def test_a_model_of_unknown_shape_is_told_at_its_key(tmp_path: Path) -> None:
    loaded = job(tmp_path, model="no-such-model")
    with pytest.raises(UserError) as raised:
        work_of(loaded, base=tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'job.yaml'}:2:8: no well-known shape is called `no-such-model`")


def test_the_optimizer_decides_the_states(tmp_path: Path) -> None:
    shape = shape_of_name("llama-3m", tmp_path)  # whose head is the embedding

    def software(**keys: Any) -> Software:
        return software_of_job(job(tmp_path, **keys).job, shape)

    assert software().states == 8
    assert software(train={"optimizer": "sgd"}).states == 4
    assert software(train={"optimizer_states": "bf16"}).states == 4
    assert software(train={"optimizer_states": "8bit"}).states == 2 * BYTES
    islands = software(parallel={"data": 2, "sync": {"every": 4, "islands": 2}})
    assert (islands.states, islands.outer) == (8, 8)
    outside = shape.vocabulary * shape.width / shape.parameters
    assert software(train={"optimizer": "muon"}).states == 4 + 4 * outside


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"data": 4, "shard": "zero3", "shard_size": 2},
        {"tensor": 2, "sequence": False, "pipeline": 2, "schedule": "interleaved"},
        {"pipeline": 2, "stages": [1, 3], "context": 2, "context_by": "ulysses", "recompute": "full"},
        {"context": 2, "shard": "zero2", "offload": "optimizer"},
    ],
)
def test_a_layout_is_read_back_from_the_block_that_it_gives(tmp_path: Path, parallel: dict[str, Any]) -> None:
    layout = layout_of(job(tmp_path, parallel=parallel).job)
    assert layout_of(job(tmp_path, parallel=parallel_block(layout)).job) == layout


@pytest.mark.slow
def test_every_plan_of_a_search_can_be_written_as_a_job(tmp_path: Path) -> None:
    work = TrainingWork(work_of(job(tmp_path), base=tmp_path).shape, 128, 8, precision="fp32")
    cluster = this_processor(4)
    plans = search(work, cluster, kept=10_000).plans
    assert {plan.setting.layout.pipeline for plan in plans} >= {1, 2, 4}
    for plan in plans:
        setting = plan.setting
        corners = {"batch": 8, "micro_batch": setting.micro_batch, "seq_len": 128, "precision": "fp32"}
        read = job(tmp_path, train=corners, parallel=parallel_block(setting.layout))
        again = setting_of_job(read.job, cluster, work_of(read, cluster, base=tmp_path))
        assert replace(again, work=work) == replace(setting, work=work)


def test_one_process_has_the_plainest_layout(tmp_path: Path) -> None:
    assert layout_of(job(tmp_path, parallel=parallel_block(Layout())).job) == Layout()


def test_a_task_says_how_many_copies_of_the_model_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = job(tmp_path)
    assert work_of(loaded, base=tmp_path).resident == 0
    referring = replace(TASKS["sft"], work=WorkSpec(resident=lambda job: int(job.tune.method == "full")))
    monkeypatch.setitem(TASKS, "sft", referring)
    assert work_of(loaded, base=tmp_path).resident == 1
    assert work_of(job(tmp_path, tune="lora"), base=tmp_path).resident == 0


WIDE = {**TINY, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}


def test_a_critic_of_its_own_is_trained_beside_the_policy(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide/config.json").write_text(json.dumps(WIDE))
    shared = {"task": "ppo", "tune": "full", "train": {"precision": "fp32", "seq_len": 512}}
    block = {"rewards": "numeric", "kl": 0.0}
    alone = work_of(job(tmp_path, **shared, ppo=block), base=tmp_path)
    both = work_of(job(tmp_path, **shared, ppo={**block, "critic": "wide"}), base=tmp_path)
    assert alone.shared_critic and not both.shared_critic and alone.critic is None and both.critic is not None
    assert replace(both, critic=None, shared_critic=True) == alone
    meta = meta_model(ModelBlock(name=str(tmp_path / "wide")), tmp_path)
    elements = sum(p.numel() for p in meta.parameters()) - 300 * 64 + 64  # one score in the place of the logits
    assert both.critic.shape.parameters == elements == both.critic.trained
    cluster, layout = load_cluster("h100"), Layout()
    first, second = (Setting(work, cluster, layout, 4) for work in (alone, both))
    before, after = (stage_memory(setting, 0).parts for setting in (first, second))
    assert after["optimizer"] - before["optimizer"] == 8 * elements
    assert after["weights"] - before["weights"] == 4 * elements
    own = step_time(Setting(both.critic, cluster, layout, 4)).total
    assert step_time(second).total == pytest.approx(step_time(first).total + own)
    lora, beside = (
        work_of(job(tmp_path, **{**shared, "tune": "lora"}, ppo={**block, **critic}), base=tmp_path)
        for critic in ({"critic": "wide"}, {})
    )
    assert beside.trained == 2 * lora.trained + beside.shape.width + 1  # a second adapter, and the critic's head
    assert lora.critic is not None and lora.critic.tuning == "lora" and lora.critic.trained < elements / 2


def test_a_reward_model_has_no_logits(tmp_path: Path) -> None:
    reward, sft = (work_of(job(tmp_path, task=task, tune="full"), base=tmp_path) for task in ("reward", "sft"))
    assert reward.shape.parameters == sft.shape.parameters + 32
    assert reward.shape.head_matmul().parameters == 32
