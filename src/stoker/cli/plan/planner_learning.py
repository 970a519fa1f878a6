"""`stoker plan --calibrate` and `stoker plan --from RUN`: measurements that later plans use."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import Problem, UserError
from stoker.job.block import LONGEST
from stoker.units import GIB

if TYPE_CHECKING:
    from stoker.hardware.measured.calibration import Calibration

TRAFFIC = ("read", "write", "copy", "add", "silu", "multiply", "to-device", "to-host")  # kinds of memory traffic


def calibrate_here(seconds: float | None, *, as_json: bool) -> int:
    """Measures this machine, stores the result and prints it."""
    from stoker.cli.output.quiet_libraries import quiet_libraries
    from stoker.hardware.machines.detect_machine import kind_name
    from stoker.hardware.measured.planner_correction import forget
    from stoker.launch.calibrate_machine import SECONDS, measure_machine

    if seconds is not None and not 0 < seconds <= LONGEST:
        raise UserError(Problem(f"--seconds {seconds:g}: not a valid number of seconds", f"write {SECONDS:g}"))
    quiet_libraries()
    begin = time.perf_counter()
    found = measure_machine(seconds or SECONDS, report=lambda text: print(f"measuring {text} ...", file=sys.stderr))
    files = [calibration.save() for calibration in found]
    for calibration in found:
        forget(kind_name(calibration.device), calibration.threads)
    taken = time.perf_counter() - begin
    if as_json:
        print(json.dumps({"files": list(map(str, files)), "calibrations": [asdict(c) for c in found]}))
        return 0
    for calibration in found:
        print("\n".join(_lines(calibration)))
    if all(calibration.nccl is None for calibration in found):
        print("\nNCCL settings are not searched: that needs two or more NVIDIA GPUs")
    print(f"\nsaved in {files[0].parent} after {taken:.0f} s; later plans for this machine use it")
    return 0


def _lines(found: Calibration) -> list[str]:
    threads = f", {found.threads} thread{'s' * (found.threads > 1)} per process" if found.threads else ""
    lines = [f"\n{found.device}{threads}", "  products (n, n) x (n, n): GFLOP/s by n"]
    for table in found.matmuls:
        lines.append(_row(table.precision, ((n, table.rate(n, n, n) / 1e9) for n in table.sizes)))
    lines.append("  memory and host copies: GB/s by MiB of traffic")
    alone = [curve for curve in found.curves if curve.ranks == 1]
    for curve in (curve for curve in alone if curve.kind in TRAFFIC):
        lines.append(
            _row(curve.kind, ((s / 2**20, s / t / 1e9) for s, t in zip(curve.sizes, curve.seconds, strict=True)))
        )
    lines.append("  attention of one head: ms by tokens of a row")
    for curve in (curve for curve in alone if curve.kind.startswith("attention")):
        lines.append(_row(curve.kind, ((s, t * 1e3) for s, t in zip(curve.sizes, curve.seconds, strict=True))))
    lines.append(f"  operator call: at least {found.launch_s * 1e6:.1f} us")
    between = [curve for curve in found.curves if curve.ranks > 1]
    if between:
        lines.append("  collectives: latency, and GB/s of large tensors")
    lines += [
        f"    {f'{curve.kind} of {curve.ranks}':<26}{curve.latency * 1e6:.0f} us  {curve.bandwidth / 1e9:.3g}"
        for curve in between
    ]
    if (nccl := found.nccl) is not None:
        faster = " ".join(f"{name}={value}" for name, value in nccl.variables.items())
        lines.append(f"  NCCL {nccl.host.nccl}: {faster or 'no setting is faster than its own choices'}")
        lines += [f"    left out: {reason}" for reason in nccl.failed]
    return lines


def _row(name: str, points: Iterable[tuple[float, float]]) -> str:
    return f"    {name:<26}" + "  ".join(f"{size:.4g}: {value:.3g}" for size, value in points)


def learn_from(path: str, *, as_json: bool) -> int:
    """Corrects later plans by a finished run; prints its predictions before and after."""
    from stoker.hardware.measured.planner_correction import keep
    from stoker.plan.run_correction import lesson_of

    lesson = lesson_of(Path(path))
    file = keep(lesson.correction)
    before, real, now = lesson.predicted, lesson.measured, lesson.correction
    if as_json:
        answer = {"file": str(file), "correction": asdict(now), "measured": asdict(real)}
        predicted = {"seconds": before.seconds, "memory": before.peak}
        print(
            json.dumps({**answer, "before": predicted, "after": {"seconds": lesson.seconds, "memory": lesson.memory}})
        )
        return 0
    print(f"{'':<12}{'step':>12}{'memory':>14}")
    rows = (
        ("measured", real.seconds, real.memory),
        ("before", before.seconds, before.peak),
        ("now", lesson.seconds, lesson.memory),
    )
    for name, seconds, memory in rows:
        off = "" if name == "measured" else f"  {seconds / real.seconds - 1:+.0%}, {memory / real.memory - 1:+.0%}"
        print(f"{name:<12}{seconds:>10.3g} s{memory / GIB:>10.2f} GiB{off}")
    constant = f", and {now.constant / GIB:+.2f} GiB" if now.constant else ""
    print(f"\ncomputation x {now.compute:.3g}, estimated memory x {now.memory:.3g}{constant}")
    threads = f" with {now.threads} threads" if now.threads else ""
    print(
        f"later plans of {now.tuning} tuning in {now.precision} on {now.device}{threads} use this correction ({file})"
    )
    return 0
