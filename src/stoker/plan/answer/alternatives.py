"""Alternative plans: the best of each kind, and the main reason why it was not chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stoker.job.layout import SHARDS, Offload, Recompute
from stoker.job.resolution.batch_solver import divisors
from stoker.plan.answer.explain import neighbour_settings
from stoker.plan.answer.time_breakdown import causes_of
from stoker.plan.search import LayoutPlan, SearchResult, search
from stoker.plan.search_space import Space
from stoker.units import GIB

TIE = 0.005  # of a step: predictions do not distinguish closer plans
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen.

    Attributes:
        called: the users' name for it; empty if it has none.
        plan: the fastest of its kind that fits; where none does, the one that comes nearest.
        slower: share of the chosen plan's seconds that it takes more.
        reason: why it lost.
    """

    called: str
    plan: LayoutPlan
    slower: float
    reason: str


def kind_of(plan: LayoutPlan) -> Kind:
    """Kind of a plan: all but details such as micro-batch, schedule and size of a hybrid copy."""
    layout = plan.setting.layout
    hybrid = layout.shard != "none" and layout.replicas > 1
    return layout.shard, hybrid, layout.tensor, layout.pipeline, layout.context, layout.recompute, layout.offload


def alternatives(found: SearchResult, *, asked: LayoutPlan | None = None) -> list[Alternative]:
    """Returns plans of other kinds than the best: those that fit, fastest first, then the others, nearest to fitting
    first.

    Args:
        asked: the plan of the layout that the job states.
    """
    best, *others = found.plans
    kinds: dict[Kind, tuple[str, LayoutPlan]] = {kind_of(best): ("", best)}
    for plan in others:
        kinds.setdefault(kind_of(plan), ("", plan))
    for called, space in _asked_about(best):
        work, cluster = best.setting.work, best.setting.cluster
        probed = search(work, cluster, software=best.setting.software, space=space, kept=1)
        for plan in probed.plans or ([probed.nearest] if probed.nearest else []):
            had = kinds.get(kind_of(plan))
            if had is None or (called and not had[0] and had[1] is not best):
                kinds[kind_of(plan)] = called, plan
    del kinds[kind_of(best)]
    if asked is not None and asked.setting != best.setting:
        kinds["the job's",] = "as the job says", asked
    lost = [
        Alternative(called, plan, plan.seconds / best.seconds - 1, reason(plan, best))
        for called, plan in kinds.values()
    ]
    fitting = sorted((other for other in lost if other.plan.fits), key=lambda other: other.slower)
    too_large = sorted((other for other in lost if not other.plan.fits), key=lambda other: other.plan.memory.upper)
    return fitting + too_large


def _asked_about(best: LayoutPlan) -> Iterable[tuple[str, Space]]:
    """Yields named kinds with their search spaces: well-known layouts, then the best plan with one axis changed."""
    setting = best.setting
    layout, cluster = setting.layout, setting.cluster
    one, around = {1}, neighbour_settings(setting)
    data = cluster.gpus
    if cluster.gpus > 1:
        flat = Space(tensor=one, pipeline=one, context=one, offload={"none"})
        yield "plain data parallel (DDP)", replace(flat, shard={"none"})
        yield "ZeRO-3 over everything", replace(flat, shard={"zero3"}, shard_size={data})
    node = max(size for size in divisors(cluster.per_node) if size <= setting.shape.most_tensor)
    if node > 1:
        yield "tensor over a node", replace(around, tensor={node}, pipeline=None, micro_batch=None)
    if layout.tensor > 1:
        yield "without tensor", replace(around, tensor=one, pipeline=None)
    if layout.pipeline > 1:
        yield "without pipeline", replace(around, pipeline=one, micro_batch=None)
    if layout.context > 1:
        yield "without context", replace(around, context=one)
    fixed = Space(tensor={layout.tensor}, pipeline={layout.pipeline}, context={layout.context})
    recompute: Recompute = "none" if layout.recompute == "full" else "full"
    yield f"recompute {recompute}", replace(fixed, recompute={recompute})
    offload: Offload = "none" if layout.offload == "optimizer" else "optimizer"
    if not cluster.device.is_cpu or offload == "none":
        yield f"offload {offload}", replace(fixed, recompute={layout.recompute}, offload={offload})
    if layout.data * layout.context > 1:
        for shard in SHARDS:
            if shard != layout.shard:
                yield "", replace(fixed, recompute={layout.recompute}, offload={layout.offload}, shard={shard})


def reason(plan: LayoutPlan, best: LayoutPlan) -> str:
    """Returns the main reason why a plan lost against the best: it does not fit, or a part of its step takes longer."""
    if not plan.fits:
        return misfit(plan)
    slower = plan.seconds - best.seconds
    if slower < TIE * best.seconds:
        return "equally fast within the accuracy of the prediction"
    ours, theirs = causes_of(best.setting), causes_of(plan.setting)
    more = {name: cause.seconds - (ours[name].seconds if name in ours else 0.0) for name, cause in theirs.items()}
    name = max(more, key=lambda name: more[name])
    return f"{theirs[name]}: {more[name] / best.seconds:+.1%} of the step"


def misfit(plan: LayoutPlan) -> str:
    """Returns the memory that does not fit, and its largest component."""
    memory, host = plan.memory, plan.setting.cluster.host_memory_gib_per_gpu
    if memory.upper <= plan.capacity:
        return f"does not fit the host: needs {memory.host / GIB:.1f} GiB for each device, available {host:.1f} GiB"
    most = max(memory.parts, key=lambda part: memory.parts[part])
    have = f"(mostly {most}), available {plan.capacity / GIB:.1f} GiB"
    if memory.peak <= plan.capacity:
        return f"may not fit: needs {memory.peak / GIB:.1f} GiB, at most {memory.upper / GIB:.1f} GiB {have}"
    return f"does not fit: needs up to {memory.upper / GIB:.1f} GiB {have}"
