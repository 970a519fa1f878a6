"""The report of ``stoker plan``: the plan, its cost, the reasons, and the alternatives."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from rich.text import Text

from stoker.cli.output.amounts import pluralise
from stoker.console import Console
from stoker.errors import CannotRun, Problem
from stoker.hardware.machines.cluster import Cluster
from stoker.plan.answer.alternatives import Alternative, misfit
from stoker.plan.answer.cost import Cost
from stoker.plan.answer.explain import MEMORY, Bottleneck, FasterChange
from stoker.plan.answer.full_answer import (
    NothingFits,
    PlanAnswer,
    PlanQuestion,
    memory_owner_name,
    stage_memory_bars,
    verdict,
)
from stoker.plan.answer.picture import plan_svg
from stoker.plan.answer.setting_to_yaml import job_yaml, time_words
from stoker.plan.answer.terminal_picture import memory_text, timeline_text
from stoker.plan.pipeline.stage_times import drawn_micro_batches, timeline_of
from stoker.plan.search import LayoutPlan
from stoker.plan.setting import TrainingWork
from stoker.plan.time.rollout_time import rollouts_of
from stoker.plan.time.speed import mfu_formula
from stoker.units import GIB

SHOWN = 5  # alternatives without a name, and helpful changes
LEFT = 10  # width of the labels at the left edge
MOST = 110  # most columns
NO_PRICE = "no price is known: write `price: 30` (per node and hour) into the cluster file"


def print_answer(found: PlanAnswer, *, pictures: bool) -> None:
    """Prints the whole answer; with ``pictures`` each stage's memory and the step's timeline."""
    question, plan = found.question, found.plan
    _head(question, f"{found.looked_at} settings in {found.seconds:.1f} s")
    print()
    _say("plan", f"{plan.setting.layout.describe()}; micro-batch {plan.setting.micro_batch}")
    for line in job_yaml(plan.setting).splitlines():
        _say("", line)
    _say("step", f"{time_words(plan.seconds)}: {_shares(plan.time.parts.items(), plan.seconds)}")
    _rollouts(plan)
    speed = found.plan.speed
    each = f"{speed.tokens_per_s_per_gpu:,.0f} per device"
    _say("speed", f"{speed.tokens_per_s:,.0f} tokens/s, {each}; MFU {speed.mfu:.1%}")
    _say("", f"MFU: {mfu_formula(question.work)}")
    _memory(found, pictures=pictures)
    _cost(found.cost, question)
    print()
    _bottlenecks(found.bottlenecks, plan)
    _faster_changes(found.faster_changes, priced=found.cost.price is not None)
    _others(found.alternatives)
    _notes(question.notes)


def refusal(found: NothingFits, *, quiet: bool) -> CannotRun:
    """Prints what would fit, unless ``quiet``; returns the error with a one-line summary."""
    if not quiet:
        _head(found.question, f"{found.looked_at} settings")
        for change in found.changes:
            plan = change.plan
            _say("would fit", f"{change.words}: {change.what}")
            _say("", f"{plan.setting.layout.describe()}: {_sizes(plan)}, {time_words(plan.seconds)} per step")
    rollouts = found.question.work.rollouts
    shared = "this batch" if rollouts is None else f"this batch and {rollouts.prompts} prompts a round"
    nearest = f"no layout can divide {shared} over these devices"
    if found.nearest is not None:
        nearest = f"the nearest is {found.nearest.setting.layout.describe()}, which {misfit(found.nearest)}"
    words = ", or ".join(f"`{change.words}`" for change in found.changes)
    hint = f"what would fit: {words}" if words else "no single change was found that would make it fit"
    return CannotRun(Problem(f"nothing fits; {nearest}", hint))


def picture(found: PlanAnswer) -> str:
    """Draws the memory of the stages and the timeline of a step as SVG."""
    plan = found.plan
    drawn = drawn_micro_batches(plan.setting)
    return plan_svg(
        stage_memory_bars(plan, found.stages),
        timeline_of(plan.setting, micro_batches=drawn),
        capacity=plan.capacity,
        after={name: plan.time.parts[name] for name in ("data parallel", "optimizer") if plan.time.parts.get(name)},
        step=_step(plan),
        title=f"{plan.setting.shape.name} on {_devices(found.question.cluster)}: {plan.setting.layout.describe()}",
    )


def _head(question: PlanQuestion, searched: str) -> None:
    work, cluster = question.work, question.cluster
    _say("cluster", f"{_devices(cluster)}, {cluster.per_node} per node")
    trained = "all trained" if work.tuning == "full" else f"{work.trained / 1e6:,.3g} million trained ({_by(work)})"
    number = work.shape.parameters
    size = f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:,.3g} million"
    _say("model", f"{work.shape.name}: {size} parameters, {trained}")
    _say("work", f"{work.global_batch} rows of {work.seq_len} tokens per step, in {work.precision}")
    _say("searched", searched)


def _rollouts(plan: LayoutPlan) -> None:
    found, sizes = rollouts_of(plan.setting), plan.setting.work.rollouts
    if found is None or sizes is None:
        return
    prompt = f"{plan.setting.work.prompt_tokens:,.0f}"
    asked = f"{sizes.prompts} prompts of {prompt} tokens, {sizes.answers} answers of {sizes.tokens} each"
    _say("rollouts", f"{time_words(found.total)} for {pluralise(max(1, round(found.steps)), 'step')}: {asked}")
    parts = {"prefill": found.prefill, "decoding": found.decode, "scoring": found.scoring}
    _say("", _shares(parts.items(), found.total))


def _by(work: TrainingWork) -> str:
    """Describes the trained parts of a model with frozen weights."""
    by = f"rank {work.rank}" if work.low_rank else f"{work.adapters.tokens} virtual tokens"
    base = "" if work.base == "none" else f", the base in {work.base}"
    return f"{work.tuning}, {by}{base}"


def _memory(found: PlanAnswer, *, pictures: bool) -> None:
    plan, stages = found.plan, found.stages
    where = f" on {memory_owner_name(plan)} {plan.stage + 1} of {len(stages)}" if len(stages) > 1 else ""
    where = f"; peak{where} at {plan.memory.moment}"
    _say("memory", f"{verdict(plan.memory, plan)}: {_sizes(plan)}{where}")
    parts = sorted(plan.memory.parts.items(), key=lambda pair: -pair[1])
    _say("", ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts if size > GIB / 20) + " GiB")
    cluster = plan.setting.cluster
    if plan.memory.host:
        have = f"{cluster.host_memory_gib_per_gpu:.0f}"
        _say("", f"host memory {plan.memory.host / GIB:.1f} GiB per device of {have}, for offloaded state")
    drawn = stage_memory_bars(plan, stages)
    shown = drawn if pictures else [drawn[stage] for stage in sorted({0, plan.stage, len(drawn) - 1})]
    _show(memory_text(shown, capacity=plan.capacity, width=_width() - LEFT))
    if pictures:
        print()
        _say("passes", f"{_step(plan)}, by process of the pipeline")
        timeline = timeline_of(plan.setting, micro_batches=drawn_micro_batches(plan.setting))
        _show(timeline_text(timeline, width=_width() - LEFT))


def _step(plan: LayoutPlan) -> str:
    """Returns the heading of the picture of a step."""
    drawn, count = drawn_micro_batches(plan.setting), plan.setting.micro_batches
    return "One step" if drawn == count else f"One step of {drawn} micro-batches instead of {count}"


def _cost(cost: Cost, question: PlanQuestion) -> None:
    cluster, saved = question.cluster, cost.forecast
    took = f"{time_words(saved.seconds)}, checkpoints and interruptions included"
    if cost.known:
        _say("run", f"{cost.steps:,} steps, {cost.tokens / 1e9:.3g} billion tokens (rows taken as full): {took}")
    else:
        epochs = f"{question.length.epochs:g} epoch{'s' * (question.length.epochs != 1)}"
        _say("run", f"the number of steps in {epochs} depends on the data, which is not read: write `steps` to set it")
        _say("", f"{cost.steps:,} steps, {cost.tokens / 1e9:.3g} billion tokens: {took}")
        _say("", f"per billion tokens: {time_words(cost.hours_per_billion_tokens * 3600)}")
    if cost.price is not None and cost.price_per_billion_tokens is not None:
        per_token = f"{cost.price_per_billion_tokens:,.2f} per billion tokens"
        _say("price", f"{cost.price:,.2f} {cost.currency}; {per_token}")
    elif not cluster.device.is_cpu:
        _say("price", NO_PRICE)
    if not cluster.failures_per_gpu_hour:
        return
    expected = f"{saved.interruptions:.2g} expected, on average one every {time_words(saved.mean_between)}"
    chance = f"{saved.chance:.1%}" if saved.chance > 5e-4 else "under 0.1%"
    _say("failures", f"{chance} chance of an interruption: {expected}")
    write = f" and is written in {time_words(cost.saving.write)}" if cost.saving.write else ""
    stall = f"each pauses training for {time_words(cost.saving.stall)}{write} ({cost.checkpoint / GIB:.0f} GiB)"
    every = f"every {cost.interval_steps:,} steps ({time_words(saved.interval)})"
    if cost.interval_steps >= cost.steps:
        every = "at the end only"
    _say("", f"best checkpoint interval: {every}, {stall}; {saved.effective:.2%} of the time is spent training")
    if cost.as_written is not None and question.length.save_every is not None:
        _say("", f"every {question.length.save_every:,} steps, as in the job: {cost.as_written.effective:.2%}")


def _bottlenecks(bottlenecks: list[Bottleneck], plan: LayoutPlan) -> None:
    label = "binds"
    for bottleneck in bottlenecks:
        share = bottleneck.seconds / plan.seconds
        if share < 0.005:
            continue
        if bottleneck.resource == MEMORY:
            _say(label, f"{MEMORY}: with twice as much the step would be {share:.1%} shorter")
        else:
            causes = _shares(((str(cause), cause.seconds) for cause in bottleneck.causes), plan.seconds)
            _say(label, f"{bottleneck.resource} {share:.1%} of the step: {causes}")
        label = ""


def _faster_changes(changes: list[FasterChange], *, priced: bool) -> None:
    label = "helps"
    for change in changes[:SHOWN]:
        words = f" ({change.words})" if change.words else ""
        each = f", {change.gain_per_device:+.1%} {'relative to its price' if priced else 'per device'}"
        _say(label, f"{change.gain:+.1%} tokens/s{each}: {change.change}{words}")
        label = ""
    if not changes:
        _say(label, "none of the changes tried: twice the memory, the links or the batch; one more node")


def _others(others: list[Alternative]) -> None:
    unnamed = [other for other in others if not other.called][:SHOWN]
    print()
    print("others    (the plan above is the simplest of those within 3 % of the fastest)")
    for other in others:
        if not other.called and other not in unnamed:
            continue
        called = f"{other.called}: " if other.called else ""
        text = f"{called}{other.plan.setting.layout.describe()}; micro-batch {other.plan.setting.micro_batch}"
        share = f"{other.slower:+.1%}" if other.plan.fits else "-"
        _say(f"{share:>8}", f"{text}. {other.reason[0].upper()}{other.reason[1:]}.")


def _notes(notes: Iterable[str]) -> None:
    for note in notes:
        _say("note", note)


def _say(label: str, words: str) -> None:
    """Prints a line with a label at the left edge; long text wraps below."""
    room = _width() - LEFT
    indent = len(words) - len(words.lstrip())
    lines = textwrap.wrap(words, room, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        print(f"{label if number == 0 else '':<{LEFT}}{line}".rstrip())


def _show(text: Text) -> None:
    console = Console(width=_width(), highlight=False)
    for line in text.split("\n", allow_blank=False):
        console.print(" " * LEFT, line, sep="", soft_wrap=True)


def _width() -> int:
    return min(MOST, shutil.get_terminal_size((MOST, 40)).columns)


def _devices(cluster: Cluster) -> str:
    return f"{cluster.gpus} x {cluster.device.name}"


def _sizes(plan: LayoutPlan) -> str:
    peak, upper, available = (size / GIB for size in (plan.memory.peak, plan.memory.upper, plan.capacity))
    return f"{peak:.1f} GiB expected, upper bound {upper:.1f} GiB, available {available:.1f} GiB"


def _shares(parts: Iterable[tuple[str, float]], total: float) -> str:
    found = sorted(parts, key=lambda pair: -pair[1])
    return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in found if seconds > total / 1000)
