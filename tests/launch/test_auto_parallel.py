"""`parallel: auto`: the planner's layout is one that the job, the model and the devices at hand can have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config, NanoChatConfig, PreTrainedConfig

from stoker.errors import CannotRun, UserError
from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.machines.detect_machine import this_processor
from stoker.hardware.measured.calibration import Calibration, Curve
from stoker.job.conflicts.all_conflicts import conflicts
from stoker.job.conflicts.conflict_view import View
from stoker.job.layout import layout_of
from stoker.job.load_job import LoadedJob, load_job
from stoker.launch.auto_parallel import cluster_at_hand, with_plan
from stoker.launch.cluster_env import RankInfo
from stoker.plan.memory.memory_formulas import peak_memory
from stoker.plan.planned_job import setting_of_job, software_of_job, work_of
from stoker.plan.search import search
from stoker.plan.search_space import trainable
from stoker.plan.setting import Setting
from stoker.plan.time.step_time import step_time

JOB = "task: pretrain\nmodel: llama-10m\ndata: text.txt\nsteps: 3\ntrain: {seq_len: 512}\nparallel: auto\n"


def load(folder: Path, *overrides: str, text: str = JOB) -> LoadedJob:
    path = folder / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.hardware.machines.detect_machine._visible_gpus", lambda: [])


def test_a_job_that_says_its_layout_is_left_alone(tmp_path: Path) -> None:
    loaded = load(tmp_path, "parallel={data: 2}")
    assert with_plan(loaded, cluster=this_processor(4)) is loaded


def test_a_processor_gets_one_process_and_a_launcher_as_many_as_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu(monkeypatch)
    assert layout_of(with_plan(load(tmp_path)).job).world == 1
    assert layout_of(with_plan(load(tmp_path, "parallel.tensor=2")).job).world == 2
    rank_info = RankInfo(rank=1, world=4, local_rank=1, local_world=2)
    cluster = cluster_at_hand(load(tmp_path), rank_info)
    assert (cluster.nodes, cluster.per_node) == (2, 2)
    assert layout_of(with_plan(load(tmp_path), rank_info).job).world == 4


def test_the_critic_is_planned_for_the_batch_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = []
    monkeypatch.setattr(
        "stoker.launch.auto_parallel.search", lambda work, *a, **k: works.append(work) or search(work, *a, **k)
    )
    text = (
        "task: ppo\nmodel: llama-10m\ntune: full\ndata: rows.jsonl\nsteps: 3\ntrain: {seq_len: 512}\nparallel: auto\n"
    )
    text += "ppo: {rewards: numeric, critic: llama-10m}\n"
    with pytest.raises(CannotRun) as error:
        with_plan(load(tmp_path, text=text), cluster=this_processor(3))
    assert str(error.value) == (
        f"{tmp_path}/job.yaml:7:11: parallel: auto: no plan for 3 x CPU can be trained: train.batch is 33, which does "
        "not divide the 32 answers of an iteration; write a divisor of 32 x 1"
    )
    (work,) = works
    assert work.critic is not None and work.critic.global_batch == work.global_batch
    assert work.global_batch % 3 == 0


def test_a_launcher_sees_one_gpu_a_process_and_starts_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stoker.hardware.machines.detect_machine._visible_gpus", lambda: [("NVIDIA H100 80GB HBM3", 79.1)]
    )
    cluster = cluster_at_hand(load(tmp_path), RankInfo(rank=0, world=16, local_rank=0, local_world=8))
    assert (cluster.nodes, cluster.per_node, cluster.device.name) == (2, 8, "H100-80GB-SXM")


def test_the_gpus_that_a_job_names_are_those_that_it_is_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stoker.hardware.machines.detect_machine._visible_gpus", lambda: [("NVIDIA H100 80GB HBM3", 79.1)] * 8
    )
    assert cluster_at_hand(load(tmp_path)).gpus == 8
    assert cluster_at_hand(load(tmp_path, "parallel.devices=[1, 3]")).gpus == 2


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_plan_has_no_conflicts_and_is_the_fastest_of_the_search(tmp_path: Path, processes: int) -> None:
    cluster = this_processor(processes)
    loaded = load(tmp_path)
    chosen = with_plan(loaded, cluster=cluster)
    assert not list(conflicts(View(chosen.job, chosen.document, set())))
    layout, train = layout_of(chosen.job), chosen.job.train
    assert layout.world == processes
    assert train.batch == train.micro_batch * train.accumulation * layout.data == 16  # type: ignore[operator]
    spec = work_of(loaded, cluster)
    best = search(spec, cluster, software=software_of_job(loaded.job, spec.shape)).plans[0]
    assert step_time(setting_of_job(chosen.job, cluster, spec)).total == pytest.approx(best.seconds)
    assert chosen.origins["parallel.data"].why == "planner"
    assert chosen.plan.startswith("planner: the fastest that fits of ")
    assert with_plan(chosen, cluster=cluster) is chosen  # planned once


def test_the_plan_says_where_the_times_of_collectives_are_from(tmp_path: Path) -> None:
    curves = (Curve("all-reduce", (1, 2**30), (1e-4, 1.0), 2), Curve("copy", (1, 2**30), (1e-6, 1.0)))
    found = Calibration("2026-11-27", "m", "d", 1, "2", (), curves, 1e-6)
    alone, two = (replace(this_processor(processes), calibration=found) for processes in (1, 2))
    said = "; collectives inside a node are those measured between 2 processes on 2026-11-27"
    assert said in with_plan(load(tmp_path), cluster=two).plan
    assert said not in with_plan(load(tmp_path), cluster=alone).plan
    assert said not in with_plan(load(tmp_path), cluster=replace(two, calibration=None)).plan


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["parallel.tensor=2"], {"tensor": 2}),
        (["parallel.data=2"], {"data": 2}),
        (["parallel.recompute=selective"], {"recompute": "selective"}),
        (["parallel.pipeline=2", "parallel.schedule=gpipe"], {"pipeline": 2, "schedule": "gpipe"}),
        (["parallel.shard=zero3", "parallel.offload=params"], {"shard": "zero3", "offload": "params"}),
        (["parallel.context=2", "parallel.context_by=ulysses", "train.seq_len=2048"], {"context_by": "ulysses"}),
    ],
)  # fmt: skip
def test_what_the_job_states_is_kept(tmp_path: Path, overrides: list[str], values: dict[str, object]) -> None:
    chosen = with_plan(load(tmp_path, *overrides, text=JOB.replace("10m", "30m")), cluster=this_processor(4))
    layout = layout_of(chosen.job)
    assert layout.world == 4
    assert {name: getattr(layout, name) for name in values} == values
    for name in values:
        assert chosen.origins[f"parallel.{name}"].source == "override"


@pytest.mark.parametrize(
    ("overrides", "batch", "micro_batch"),
    [
        (["train.batch=4"], 4, None),
        (["train.micro_batch=2"], 8, 2),
        (["train.micro_batch=2", "train.accumulation=3"], 24, 2),
        (["train.batch=12", "train.accumulation=3"], 12, None),
    ],
)
def test_the_batch_that_the_job_states_is_kept(
    tmp_path: Path, overrides: list[str], batch: int, micro_batch: int | None
) -> None:
    train = with_plan(load(tmp_path, *overrides), cluster=this_processor(4)).job.train
    assert train.batch == batch
    assert micro_batch in (None, train.micro_batch)
    assert "train.accumulation=3" not in overrides or train.accumulation == 3


def test_islands_are_planned_with_the_layout(tmp_path: Path) -> None:
    cluster = load_cluster("2x4xH100")
    loaded = load(tmp_path, "parallel.sync.every=10", "parallel.sync.outer=average", "evaluate.every=10")
    chosen = with_plan(loaded, cluster=cluster)
    sync = chosen.job.parallel.sync
    assert (sync.every, sync.outer, sync.islands) == (10, "average", 2)
    found = search(work_of(loaded, cluster), cluster)
    assert {plan.setting.layout.islands for plan in found.plans} == {2}
    assert "2 islands, synchronised every 10 steps" in found.plans[0].setting.layout.describe()
    one = with_plan(load(tmp_path, "parallel.sync.every=10", "evaluate.every=10"), cluster=this_processor(4))
    assert one.job.parallel.sync.islands == layout_of(one.job).replicas > 1


def test_a_default_batch_has_a_row_for_every_process(tmp_path: Path) -> None:
    assert with_plan(load(tmp_path), cluster=load_cluster("4x8xH100")).job.train.batch == 32


def model_folder(folder: Path, config: PreTrainedConfig) -> str:
    config.save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (GPT2Config(n_layer=4, n_embd=64, n_head=4), {"tensor", "pipeline", "context"}),
        (
            NanoChatConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, intermediate_size=64),
            {"tensor", "context"},
        ),
    ],
    ids=["gpt2", "nanochat"],
)
def test_axes_that_a_family_refuses_are_not_planned(tmp_path: Path, config: PreTrainedConfig, axes: set[str]) -> None:
    name = model_folder(tmp_path, config)
    for axis in ("tensor", "pipeline", "context"):
        loaded = load(tmp_path, f"model={name}", "train.seq_len=2048", f"parallel.{axis}=2", "train.batch=2")
        if axis in axes:
            assert getattr(layout_of(with_plan(loaded, cluster=this_processor(2)).job), axis) == 2
        else:
            with pytest.raises(CannotRun, match=f"parallel.{axis}: {config.model_type} cannot be split so"):
                with_plan(loaded, cluster=this_processor(2))
    free = load(tmp_path, f"model={name}", "train.seq_len=2048", "train.batch=1")  # one row: it must be split
    layout = layout_of(with_plan(free, cluster=this_processor(2)).job)
    assert {axis for axis in ("tensor", "pipeline", "context") if getattr(layout, axis) > 1} <= axes


def test_nothing_fits(tmp_path: Path) -> None:
    small = this_processor(2)
    small = replace(small, device=replace(small.device, memory_gib=0.01))
    with pytest.raises(CannotRun, match=r"nothing fits 2 x CPU; the nearest is .* available 0\.0 GiB") as raised:
        with_plan(load(tmp_path), cluster=small)
    assert raised.value.exit_code == 3


def test_a_host_that_cannot_hold_what_is_offloaded_is_named(tmp_path: Path) -> None:
    small = replace(load_cluster("2xA100-80GB"), host_memory_gib=0.02)
    loaded = load(tmp_path, "parallel.shard=zero1", "parallel.offload=optimizer")
    with pytest.raises(CannotRun, match=r"which does not fit the host: needs 0\.\d GiB .* available 0\.0"):
        with_plan(loaded, cluster=small)


def with_memory(gib: float, processes: int = 4) -> Cluster:
    cluster = this_processor(processes)
    return replace(cluster, device=replace(cluster.device, memory_gib=gib))


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        (["parallel.pipeline=4", "parallel.schedule=gpipe"], 3.5),
        (["parallel.pipeline=4", "parallel.recompute=selective"], 2.3),
        (["parallel.tensor=4", "parallel.sequence=false"], 1.6),
    ],
    ids=["gpipe", "selective", "no sequence"],
)
def test_what_is_planned_fits_with_the_values_that_the_job_states(
    tmp_path: Path, overrides: list[str], gib: float
) -> None:
    loaded = load(tmp_path, *overrides, "train.micro_batch=2", text=JOB.replace("10m", "110m"))
    cluster = with_memory(gib)
    chosen = with_plan(loaded, cluster=cluster)
    _, memory = peak_memory(setting_of_job(chosen.job, cluster, work_of(loaded, cluster)))
    assert memory.upper <= gib * 2**30


def test_what_fits_only_with_the_value_that_the_job_states_is_planned(tmp_path: Path) -> None:
    """Weights on the host too, where the optimizer's states alone would leave too little of the device."""
    cluster = load_cluster("2xA100-80GB")
    cluster = replace(cluster, device=replace(cluster.device, memory_gib=2.0))
    overrides = ("parallel.shard=zero3", "parallel.offload=params", "train.micro_batch=1", "train.seq_len=128")
    loaded = load(tmp_path, *overrides, text=JOB.replace("10m", "110m"))
    chosen = with_plan(loaded, cluster=cluster)
    assert layout_of(chosen.job).offload == "params"
    with pytest.raises(CannotRun, match="nothing fits"):
        with_plan(
            load(tmp_path, *overrides, "parallel.offload=optimizer", text=JOB.replace("10m", "110m")),
            cluster=cluster,
        )


@pytest.mark.parametrize(
    ("override", "layout"),
    [
        ("train.optimizer=adafactor", "{tensor: 2}"),
        ("train.optimizer=adafactor", "{data: 2, shard: zero1}"),
        ("train.optimizer=muon", "{tensor: 2}"),
        ("train.optimizer=muon", "{offload: optimizer}"),
        ("train.compile=true", "{pipeline: 2, schedule: zbv}"),
    ],
)
def test_layouts_that_the_optimizer_excludes_are_not_searched(tmp_path: Path, override: str, layout: str) -> None:
    loaded = load(tmp_path, override)
    stated = layout_of(load(tmp_path, f"parallel={layout}").job)
    setting = Setting(work_of(loaded), load_cluster(f"{stated.world}xH100"), stated, 1)
    assert not trainable(setting) and trainable(replace(setting, work=work_of(load(tmp_path))))
    with pytest.raises(UserError):
        load(tmp_path, override, f"parallel={layout}")


def test_refused_layouts_leave_room_for_those_that_can_be_trained(tmp_path: Path) -> None:
    cluster = load_cluster("8xA100-80GB")
    loaded = load(tmp_path, "train.optimizer=adafactor", text=JOB.replace("10m", "110m"))
    work = work_of(loaded, cluster)
    plans = search(work, cluster, software=software_of_job(loaded.job, work.shape)).plans
    assert {(plan.setting.layout.shard, plan.setting.layout.tensor) for plan in plans} == {("none", 1)}
    assert layout_of(with_plan(loaded, cluster=cluster).job).world == 8


def test_no_layout_agrees(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="no layout of 2 x CPU agrees with what the job states and a batch of 16"):
        with_plan(load(tmp_path, "parallel.tensor=3"), cluster=this_processor(2))


def test_the_prompts_of_a_policy_are_shared_equally(tmp_path: Path) -> None:
    job = JOB.replace("task: pretrain", "task: grpo").replace("10m", "110m") + "tune: lora\n"
    job += "grpo: {rewards: numeric, answers: 16, prompts: 4}\n"
    loaded = load(tmp_path, text=job)
    layout = layout_of(with_plan(loaded, cluster=load_cluster("8xA100-80GB")).job)
    assert layout.world == 8 and 4 % layout.data == 0
    with pytest.raises(CannotRun, match=r"a batch of \d+ and 3 prompts a round"):  # `dora` excludes `tensor`
        with_plan(load(tmp_path, "grpo.prompts=3", "tune.dora=true", text=job), cluster=load_cluster("2xH100"))


def module_job(cluster: Cluster, folder: Path, batch: int) -> LoadedJob:
    text = 'task: module\nmodule: {model: "torch.nn:Linear", loss: "torch.nn:MSELoss", data: "torch:ones"}\n'
    return with_plan(load(folder, text=f"{text}steps: 2\ntrain: {{batch: {batch}}}\nparallel: auto\n"), cluster=cluster)


def test_a_module_of_unknown_shape_is_spread_over_the_data(tmp_path: Path) -> None:
    cluster = this_processor(4)
    assert layout_of(module_job(cluster, tmp_path, 8).job).describe() == "data 4"
    found = module_job(cluster, tmp_path, 6)
    assert layout_of(found.job).describe() == "data 3"  # the most that 6 rows can be shared out to
    assert "does not know the model's shape" in found.plan


def test_a_wrong_launcher_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    with pytest.raises(UserError, match="11 processes cannot be divided equally among machines of 4"):
        with_plan(load(tmp_path), RankInfo(rank=0, world=11, local_rank=0, local_world=4))
