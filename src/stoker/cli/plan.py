"""Which layout to train with, and what it takes: memory for each device, seconds of a step, why not another."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import CannotRun, Problem, UserError

if TYPE_CHECKING:
    from stoker.job import LoadedJob
    from stoker.plan.search import Found, Plan
    from stoker.plan.setting import Work

SHOWN = 5  # alternatives
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker plan``."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    parser.add_argument("--on", metavar="CLUSTER", default="local", help="a cluster file, or words like 4x8xH100")
    parser.add_argument("--cases", metavar="FILE", help="predict each row of a table of runs instead")
    parser.add_argument("--out", metavar="FILE", help="where the predictions of --cases go (default: standard output)")
    parser.add_argument("--rank", metavar="FILE", help="order the rows of each group of a table by predicted speed")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Plan; returns 0, or exits with 3 where nothing fits."""
    if arguments.cases:
        return _cases(Path(arguments.cases), Path(arguments.out) if arguments.out else None)
    if arguments.rank:
        return _rank(Path(arguments.rank))
    if not arguments.job:
        raise UserError(Problem("no job is given", "write `stoker plan JOB --on CLUSTER`"))
    from stoker.hardware.cluster_file import load_cluster
    from stoker.job import load_job
    from stoker.plan.search import search

    loaded = load_job(arguments.job, arguments.overrides)
    work = _work(loaded)
    cluster = load_cluster(arguments.on)
    begin = time.perf_counter()
    found = search(work, cluster)
    seconds = time.perf_counter() - begin
    if not found.plans:
        raise CannotRun(_nothing_fits(found))
    if arguments.json:
        plans = [_as_json(plan) for plan in found.plans]
        result = {"plan": plans[0], "alternatives": plans[1:], "looked_at": found.looked_at, "seconds": seconds}
        print(json.dumps(result))
        return 0
    print(f"cluster   {cluster.gpus} x {cluster.device.name}, {cluster.per_node} a node")
    print(f"model     {work.shape.name}: {work.shape.parameters / 1e9:.2f} billion parameters")
    print(f"searched  {found.looked_at} settings in {seconds:.1f} s\n")
    _show(found.plans)
    return 0


def _work(loaded: LoadedJob) -> Work:
    from stoker.plan.setting import Work
    from stoker.plan.shapes.find import shape_of_model

    job = loaded.job
    if job.model is None:
        raise UserError(loaded.problem("task", f"a job of task {job.task} has no model to plan for"))
    batch = 32 if job.train.batch == "auto" else job.train.batch
    seq_len = 2048 if job.train.seq_len == "auto" else job.train.seq_len
    precision = "bf16" if job.train.precision == "auto" else job.train.precision
    tuning: Any = job.tune.method if job.tune.method in ("lora", "qlora") else "full"
    return Work(shape_of_model(job.model.name), seq_len, batch, precision=precision, tuning=tuning)


def _show(plans: tuple[Plan, ...]) -> None:
    best = plans[0]
    setting = best.setting
    print(f"plan      {setting.layout.describe()}; micro-batch {setting.micro_batch} x {setting.micro_batches}")
    print(f"step      {best.seconds:.3g} s, of it " + _shares(best.time.parts, best.seconds))
    bound = f"{best.memory.upper / GIB:.1f} at most, of {best.capacity / GIB:.1f}"
    print(f"memory    {best.memory.peak / GIB:.1f} GiB ({bound}) on stage {best.stage + 1} of {len(setting.stages)}:")
    for part, size in sorted(best.memory.parts.items(), key=lambda pair: -pair[1]):
        print(f"          {part:<14} {size / GIB:>8.2f} GiB")
    print("\nothers")
    for plan in plans[1 : SHOWN + 1]:
        slower = plan.seconds / best.seconds - 1
        print(f"  {slower:>+6.1%}  {plan.setting.layout.describe()}; micro-batch {plan.setting.micro_batch}")


def _shares(parts: Any, total: float) -> str:
    found = sorted(parts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in found if seconds > total / 200)


def _nothing_fits(found: Found) -> Problem:
    if found.nearest is None:
        return Problem("no layout divides this batch over these devices", "change train.batch or the cluster")
    plan = found.nearest
    need, have = plan.memory.upper / GIB, plan.capacity / GIB
    nearest = f"the nearest is {plan.setting.layout.describe()}: {need:.1f} GiB of {have:.1f}"
    return Problem(f"nothing fits; {nearest}", "give more devices, a shorter train.seq_len, or tune: lora")


def _as_json(plan: Plan) -> dict[str, Any]:
    from dataclasses import asdict

    setting = plan.setting
    return {
        "layout": asdict(setting.layout),
        "micro_batch": setting.micro_batch,
        "accumulation": setting.micro_batches,
        "step_time_s": plan.seconds,
        "time": dict(plan.time.parts),
        "memory_gib": plan.memory.peak / GIB,
        "memory_upper_gib": plan.memory.upper / GIB,
        "memory": {part: size / GIB for part, size in plan.memory.parts.items()},
        "capacity_gib": plan.capacity / GIB,
        "host_gib": plan.memory.host / GIB,
    }


def _cases(path: Path, out: Path | None) -> int:
    from stoker.plan.cases import as_json, predict_all, read_rows

    predictions, problems = predict_all(read_rows(path), file=str(path))
    _say(problems)
    text = "".join(f"{as_json(found)}\n" for found in predictions)
    if out is None:
        print(text, end="")
    else:
        _write(out, text)
    return 0


def _rank(path: Path) -> int:
    """One line for each group: its rows' numbers, the fastest first."""
    from stoker.plan.cases import predict_all, read_rows

    groups: dict[str, list[tuple[float, Any]]] = {}
    predictions, problems = predict_all(read_rows(path), file=str(path))
    _say(problems)
    for found in predictions:
        if found.group is not None and found.tokens_per_s_per_gpu is not None:
            groups.setdefault(found.group, []).append((found.tokens_per_s_per_gpu, found.row_id))
    for group, rows in groups.items():
        rows.sort(key=lambda pair: -pair[0])
        print(
            json.dumps(
                {"group": group, "row_ids": [row for _, row in rows], "tokens_per_s_per_gpu": [s for s, _ in rows]}
            )
        )
    return 0


def _say(problems: list[Problem]) -> None:
    for problem in problems:
        print(f"no prediction: {problem}", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(Problem(f"cannot be written: {error.strerror}", file=str(path))) from None
