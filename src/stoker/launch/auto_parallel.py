"""`parallel: auto`: plans the layout for a job on the available devices, before any process starts.

The planner chooses among the layouts that agree with the job's explicit keys of layout and batch. Each candidate
is checked like a job that states it, and against the model's family; the fastest that passes is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import CannotRun, Problem, UserError
from stoker.hardware.machines.cluster import Cluster
from stoker.hardware.machines.detect_machine import machines, this_machine, this_processor
from stoker.job.conflicts.conflict_view import View
from stoker.job.document.yaml_document import Mark
from stoker.job.keys.key_paths import KeyPath
from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import JobError, LoadedJob, check_document
from stoker.job.resolution.resolve import Origin
from stoker.launch.cluster_env import RankInfo
from stoker.plan.planned_job import parallel_block, setting_of_job, software_of_job, work_of
from stoker.plan.search import KEPT, LayoutPlan, SearchResult, search
from stoker.plan.search_space import Space
from stoker.plan.setting import Setting, TrainingWork
from stoker.units import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AXES = ("tensor", "pipeline", "context")
SEARCHED = (*AXES, "recompute", "shard", "shard_size", "schedule", "offload")  # keys that a search space expresses


def cluster_at_hand(loaded: LoadedJob, rank_info: RankInfo | None = None) -> Cluster:
    """Returns the devices of a job without a layout: a launcher's, those that the job names, or all of this machine.

    Without GPUs it has as many processes as the stated part of the layout needs, at least one.

    Raises:
        UserError: the launcher's machines have different numbers of processes, or a GPU is unknown.
    """
    if rank_info is not None:
        return machines(rank_info.world, rank_info.local_world)
    devices = loaded.job.parallel.devices
    here = this_machine(devices=None if devices == "auto" else devices)
    return this_processor(layout_of(loaded.job).world) if here.device.is_cpu else here


def with_plan(loaded: LoadedJob, rank_info: RankInfo | None = None, *, cluster: Cluster | None = None) -> LoadedJob:
    """Returns the job with the planner's layout and micro-batch if it has `parallel: auto`; else unchanged.

    Args:
        rank_info: rank and world size of this process, where a launcher started it.
        cluster: the cluster to plan for; by default `cluster_at_hand`.

    Raises:
        CannotRun: nothing fits, or nothing that fits can be trained.
    """
    if not loaded.document.planned:
        return loaded
    cluster = cluster or cluster_at_hand(loaded, rank_info)
    loaded = replace(loaded, document=replace(loaded.document, nodes=cluster.nodes))
    stated = _Stated.of(loaded)
    batch = stated.batch(loaded, cluster.gpus)
    try:
        work = work_of(loaded, cluster).resized(global_batch=batch)
    except UserError as error:
        return _spread_over_data(loaded, cluster, stated, batch, why=error.problems[0].message)
    model = _meta_model(loaded) if cluster.gpus > 1 else None
    _check_family(stated, model)
    found = search(
        work,
        cluster,
        software=software_of_job(loaded.job, work.shape),
        space=stated.space(),
        kept=KEPT if stated.in_space else 10**6,
    )
    refused: list[Problem] = []
    too_large: LayoutPlan | None = None
    for plan in filter(stated.agrees, found.plans):
        try:
            chosen = _with_setting(loaded, stated, plan.setting)
        except JobError as error:
            refused += error.problems
            continue
        problem = _model_problem(model, chosen)
        if problem is not None:
            refused.append(problem)
            continue
        final = _plan_of_job(chosen, cluster, work)
        if final.fits:
            return replace(chosen, plan=_summary(final, found))
        if too_large is None or final.memory.upper < too_large.memory.upper:
            too_large = final
    raise CannotRun(_no_plan(replace(found, nearest=found.nearest or too_large), work, cluster, refused))


@dataclass(frozen=True)
class _Stated:
    """The job's explicit keys of layout and batch, by the names of `Layout` and of the block `train`."""

    layout: Mapping[str, Any]
    corners: Mapping[str, int]

    @staticmethod
    def of(loaded: LoadedJob) -> _Stated:
        view = View(loaded.job, loaded.document, set())
        names = (*vars(Layout()), "devices", "expert")
        layout = {name: view.value(f"parallel.{name}") for name in names if view.given(f"parallel.{name}")}
        corners = ("batch", "micro_batch", "accumulation")
        return _Stated(layout, {c: view.value(f"train.{c}") for c in corners if view.given(f"train.{c}")})

    @property
    def in_space(self) -> bool:
        """Returns whether the search space can express every explicit key."""
        usual = vars(Layout())
        other = {name for name, value in self.layout.items() if value != usual.get(name)}
        return other <= {*SEARCHED, "devices"} and "accumulation" not in self.corners

    def batch(self, loaded: LoadedJob, processes: int) -> int:
        """Returns the rows of a step: as written, else the task's default, or one pass of each process if more."""
        batch = loaded.job.train.batch
        if "batch" in self.corners:
            return batch
        unit = processes * self.corners.get("micro_batch", 1) * self.corners.get("accumulation", 1)
        return -(-batch // unit) * unit

    def agrees(self, plan: LayoutPlan) -> bool:
        """Returns whether a plan agrees with the explicit keys that the search space cannot express."""
        setting = plan.setting
        data, accumulation = self.layout.get("data"), self.corners.get("accumulation")
        return data in (None, setting.layout.data) and accumulation in (None, setting.micro_batches)

    def space(self) -> Space:
        """Returns the search space restricted to the explicit keys."""
        narrowed: dict[str, Any] = {name: (self.layout[name],) for name in SEARCHED if name in self.layout}
        if "micro_batch" in self.corners:
            narrowed["micro_batch"] = (self.corners["micro_batch"],)
        return Space(**narrowed)


def _meta_model(loaded: LoadedJob) -> PreTrainedModel:
    """Returns the model on the meta device: its configuration decides how it can be split."""
    from stoker.models.load_model import meta_model
    from stoker.models.prepare_architecture import training_form

    assert loaded.job.model is not None
    model = meta_model(loaded.job.model, Path.cwd())
    training_form(model)
    return model


def _check_family(stated: _Stated, model: PreTrainedModel | None) -> None:
    """Checks that the model's family can be split over the axes that the job states.

    Raises:
        CannotRun: it cannot.
    """
    if model is None:
        return
    from stoker.models.families import family_of

    family = family_of(model.config)
    for axis in AXES:
        if stated.layout.get(axis, 1) > 1 and (family is None or axis in family.refused):
            reasons: Mapping[str, str] = dict(family.refused) if family else {}  # type: ignore[arg-type]
            why = reasons.get(axis, "nothing is known about its layers")
            raise CannotRun(Problem(f"parallel.{axis}: {model.config.model_type} cannot be split so: {why}"))


def _with_setting(loaded: LoadedJob, stated: _Stated, setting: Setting) -> LoadedJob:
    """Returns the job with a plan's layout and batch, checked.

    Raises:
        JobError: the job cannot have them.
    """
    corners = {"batch": setting.work.global_batch, "micro_batch": setting.micro_batch}
    return _with_layout(loaded, stated, parallel_block(setting.layout), corners)


def _with_layout(loaded: LoadedJob, stated: _Stated, block: Mapping[str, Any], corners: Mapping[str, int]) -> LoadedJob:
    """Returns the job with a layout and a batch, checked; the keys that the job states stay.

    Raises:
        JobError: the job cannot have them.
    """
    written = loaded.document
    sync = written.data["parallel"].get("sync")  # not the planner's choice, but it affects the cost
    block = {**block, **stated.layout, **({"sync": sync} if sync else {})}
    corners = {**corners, **stated.corners}
    data = {**written.data, "parallel": block, "train": {**(written.data.get("train") or {}), **corners}}
    # A problem with a value of the planner's is reported at the `auto` that asked for it.
    paths = [*(("parallel", name) for name in block), *(("train", name) for name in corners)]
    auto = written.marks[("parallel",)]
    marks: dict[KeyPath, Mark] = {**dict.fromkeys(paths, auto), **written.marks}
    document = replace(written, data=data, marks=marks, planned=False)
    checked = check_document(document)
    origins = dict(checked.origins)
    chosen = [f"parallel.{name}" for name in block if name not in stated.layout]
    chosen += [f"train.{name}" for name in (*corners, "accumulation") if name not in stated.corners]
    origins |= {key: Origin("default", "", "planner") for key in chosen}
    if checked.job.train.batch == loaded.job.train.batch:  # not the planner's choice
        origins["train.batch"] = loaded.origins["train.batch"]
    return replace(checked, origins=origins)


def _model_problem(model: PreTrainedModel | None, loaded: LoadedJob) -> Problem | None:
    """Returns why the model cannot have the job's layout; None if it can."""
    if model is None:
        return None
    from stoker.parallel.layout_check import layout_problem

    return layout_problem(model, layout_of(loaded.job), loaded)


def _plan_of_job(loaded: LoadedJob, cluster: Cluster, work: TrainingWork) -> LayoutPlan:
    """Returns the plan with all values of the job, those that the search did not consider among them."""
    from stoker.plan.memory.memory_formulas import allocatable_bytes, peak_memory
    from stoker.plan.time.step_time import step_time

    setting = setting_of_job(loaded.job, cluster, work)
    stage, memory = peak_memory(setting)
    capacity = allocatable_bytes(cluster)
    return LayoutPlan(setting, stage, memory, step_time(setting), capacity)


def _spread_over_data(loaded: LoadedJob, cluster: Cluster, stated: _Stated, batch: int, *, why: str) -> LoadedJob:
    """Returns the job with data parallelism over all processes that the batch has rows for, if the shape is unknown."""
    others = [stated.layout.get(axis, 1) for axis in AXES]
    most = max(1, cluster.gpus // (others[0] * others[1] * others[2]))
    data = max(count for count in range(1, most + 1) if batch % (count * stated.corners.get("micro_batch", 1)) == 0)
    found = _with_layout(loaded, stated, {"data": data}, {"batch": batch})
    return replace(found, plan=f"the planner does not know the model's shape ({why}), and spreads over the data")


def _summary(plan: LayoutPlan, found: SearchResult) -> str:
    memory, capacity = plan.memory, plan.capacity / GIB
    most = f"{memory.peak / GIB:.2f} GiB ({memory.upper / GIB:.2f} at most, of {capacity:.1f})"
    if links := plan.setting.cluster.measured_links:
        most += f"; {links}"
    return f"planner: the fastest that fits of {found.looked_at}; {plan.seconds:.3g} s a step, {most}"


def _no_plan(found: SearchResult, work: TrainingWork, cluster: Cluster, refused: list[Problem]) -> Problem:
    devices = f"{cluster.gpus} x {cluster.device.name}"
    if found.nearest is not None:
        from stoker.plan.answer.alternatives import misfit

        plan = found.nearest
        return Problem(
            f"parallel: auto: nothing fits {devices}; the nearest is {plan.setting.layout.describe()}, "
            f"micro-batch {plan.setting.micro_batch}, which {misfit(plan)}",
            "give more devices, a shorter train.seq_len, or tune: lora; `stoker plan` says which helps",
        )
    if refused:
        message = f"parallel: auto: no plan for {devices} can be trained: {refused[0].message}"
        return replace(refused[0], message=message)
    if work.rollouts is not None:
        return Problem(
            f"parallel: auto: no layout of {devices} agrees with what the job states, a batch of {work.global_batch} "
            f"and {work.rollouts.prompts} prompts a round",
            "change train.batch or `prompts`, which data-parallel processes share equally, or leave more of the layout "
            "to the planner",
        )
    return Problem(
        f"parallel: auto: no layout of {devices} agrees with what the job states and a batch of {work.global_batch}",
        "change train.batch, or leave more of the layout to the planner",
    )
