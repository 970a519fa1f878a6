"""How far the planner's predictions are from published measurements, by source.

    python benchmarks/planner_accuracy.py MEASURED.jsonl [--failed FAILED.jsonl] [--held-out]

Rows have the fields that `planner_cases.py` reads, and what was measured: ``memory_gib``, ``step_time_s`` or
``tokens_per_s_per_gpu``, ``group`` for rows that differ in their plan only. Time is compared on rows whose
``time_quality`` and ``quality`` say nothing against it; plans are ranked with all rows of a group. With --held-out only
rows count that `planner_fit.py` fits nothing to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from planner_runs.cases import Prediction, predict, setting_of
from planner_runs.rows import Row, read_rows

from stoker.errors import UserError
from stoker.hardware.machines.cluster import cluster_of
from stoker.hardware.machines.device_names import device_kind
from stoker.plan.search import search
from stoker.plan.setting import TrainingWork
from stoker.plan.shapes.model_names import shape_named


def measured_seconds(row: dict[str, Any]) -> float | None:
    """Published or derived seconds of a step."""
    return row.get("step_time_s") or (row.get("derived") or {}).get("step_time_s")


def measured_speed(row: dict[str, Any]) -> float | None:
    """Tokens/s/GPU."""
    return row.get("tokens_per_s_per_gpu") or (row.get("derived") or {}).get("tokens_per_s_per_gpu")


def clean(row: dict[str, Any]) -> bool:
    """Whether its time can be compared."""
    return not row.get("quality") and row.get("time_quality") in (None, "clean")


def held_out(row: Row) -> bool:
    """Whether a row is of the half that nothing is fitted to: whole groups, and single rows where there are none."""
    key = str((row["source"], row.get("group") or row["row_id"]))
    return hashlib.md5(key.encode()).digest()[0] % 2 == 1


def source_of(row: dict[str, Any]) -> str:
    """A short name."""
    return str(row["source"])[:48]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--failed", type=Path)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    memory: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    dense: list[float] = []
    verdicts: dict[str, int] = defaultdict(int)
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _, row in rows_of(arguments.file):
        if arguments.held_out and not held_out(row):
            continue
        try:
            found = predict(dict(row))
        except UserError as problem:
            print("cannot:", row.get("row_id"), problem)
            continue
        source = source_of(dict(row))
        if row.get("memory_gib") and not row.get("quality"):
            assert found.memory_gib
            memory[source].append(found.memory_gib / row["memory_gib"] - 1)
        verdicts[str(found.verdict)] += 1
        error = time_error(row, found)
        if error is not None and clean(dict(row)):
            seconds[source].append(error)
            if is_dense(row):
                dense.append(error)
        if row.get("group") and (rate := measured_speed(dict(row))) and found.tokens_per_s_per_gpu:
            groups[row["group"]].append((found.tokens_per_s_per_gpu, rate))
    table("memory", memory)
    table("step time", seconds)
    line("dense models on A100 and H100", dense)
    ranks(groups)
    ran = sum(verdicts.values())
    shares = ", ".join(f"{name} {count} ({count / max(1, ran):.1%})" for name, count in sorted(verdicts.items()))
    print(f"\nverdicts on {ran} runs that ran: {shares}")
    if arguments.failed:
        failed(arguments.failed)
    searched()


def time_error(row: Row, found: Prediction) -> float | None:
    """Relative error of the step time, or of the speed where only that is published."""
    if (actual := measured_seconds(dict(row))) and found.step_time_s:
        return found.step_time_s / actual - 1
    if (rate := measured_speed(dict(row))) and found.tokens_per_s_per_gpu:
        return rate / found.tokens_per_s_per_gpu - 1
    return None


def is_dense(row: Row) -> bool:
    """Whether a row is of a model without experts, all of it trained, on A100 or H100."""
    setting = setting_of(row)
    dense = setting.shape.mixture is None and setting.work.tuning == "full"
    return dense and setting.cluster.device.name.startswith(("A100", "A800", "H100"))


def rows_of(path: Path) -> list[tuple[int, Row]]:
    """The rows, or a clear end."""
    try:
        return list(read_rows(path))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def table(title: str, errors: dict[str, list[float]]) -> None:
    """Mean and median of the absolute error, and the median error."""
    print(f"\n{title:<50} {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7}")
    for source, found in sorted(errors.items(), key=lambda pair: -len(pair[1])):
        line(source, found)
    line("all", [error for found in errors.values() for error in found])


def line(name: str, found: list[float]) -> None:
    if not found:
        print(f"{name:<50} {0:>5}")
        return
    absolute = [abs(error) for error in found]
    print(f"{name:<50} {len(found):>5} {mean(absolute):>7.1%} {median(absolute):>7.1%} {median(found):>7.1%}")


def ranks(groups: dict[str, list[tuple[float, float]]]) -> None:
    """Slowdown of the plan predicted fastest against the one measured fastest, and whether that is in the top three."""
    print(f"\n{'choosing a plan':<50} {'groups':>6} {'slower':>7} {'top 3':>6} {'best':>6}")
    kinds: dict[str, list[tuple[float, bool, bool]]] = defaultdict(list)
    for name, plans in groups.items():
        if len(plans) < 5:
            continue
        best = max(rate for _, rate in plans)
        order = sorted(plans, reverse=True)
        result = (best / order[0][1] - 1, best in [r for _, r in order[:3]], best == order[0][1])
        kinds["/".join(name.split("/")[:2]) if name.startswith("vtrain") else name.split("/")[0]].append(result)
    kinds["all"] = [result for found in kinds.values() for result in found]
    for kind, found in kinds.items():
        loss, third, first = (mean(r[i] for r in found) for i in range(3))
        print(f"{kind:<50} {len(found):>6} {loss:>7.1%} {third:>6.0%} {first:>6.0%}")


def failed(path: Path) -> None:
    """Verdicts on runs that did not run."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for _, row in rows_of(path):
        try:
            found: Prediction = predict(dict(row))
        except UserError as error:
            print("cannot:", row.get("row_id"), error)
            continue
        kinds[f"{source_of(dict(row))[:30]} {row.get('status')}"][str(found.verdict)] += 1
    print("\nverdicts on runs that failed:")
    for kind, counts in kinds.items():
        print(f"  {kind:<48} {json.dumps(counts)}")


def searched() -> None:
    """A search for 1,024 GPUs."""
    work = TrainingWork(shape_named("llama3-70b"), 8192, 1024)
    begin = time.process_time()
    found = search(work, cluster_of(device_kind("H100"), gpus=1024))
    seconds = time.process_time() - begin
    print(f"\nsearch: Llama 3 70B on 1,024 H100, {found.looked_at:,} settings in {seconds:.1f} s of processor time")


if __name__ == "__main__":
    main()
