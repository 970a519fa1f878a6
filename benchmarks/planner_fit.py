"""Fits the planner's shares and latencies to half of a table of published runs, and tests them on the other half.

    python benchmarks/planner_fit.py MEASURED.jsonl

Halves are whole groups (the same model, devices and batch) where a source has them, and single runs where not. A number
is drawn to what it would be for physical reasons (`PRIORS`), by as much as its spread says: data that do not tell two
causes apart leave them where they were. It prints the numbers, to be written into `plan/time/efficiency.py` and
`planner_runs/programs.py` by hand, and the errors of both halves.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np
from planner_accuracy import clean, held_out, measured_seconds
from planner_runs.cases import setting_of
from planner_runs.rows import read_rows
from scipy.optimize import least_squares

from stoker.errors import UserError
from stoker.plan.setting import Setting
from stoker.plan.time.efficiency import Efficiency
from stoker.plan.time.step_time import step_time

Numbers = Mapping[str, float]
Case = tuple[str, str, Setting, float]  # source, kind of device, setting, seconds

# What each number is expected to be, the spread of that as a factor's logarithm, and the most that it can be.
PRIORS: dict[str, tuple[float, float, float]] = {
    **{f"{kind}.{name}": prior for kind in ("A100", "H100", "V100", "B200") for name, prior in {
        "matmul": (0.72, 0.1, 0.95), "half_rows": (250.0, 0.5, 1e9), "half_width": (120.0, 0.4, 1e9),
        "attention": (0.33, 0.1, 0.7), "link": (0.8, 0.2, 1.0), "start": (4.0, 0.5, 1e3),
    }.items()},
    "H100.low_matmul": (0.6, 0.15, 0.8), "B200.low_matmul": (0.55, 0.15, 0.8), "B200.fp4_matmul": (0.4, 0.3, 0.8),
    "B200.matmul": (0.6, 0.2, 0.95), "ultra": (1.2, 0.15, 2.0), "network": (0.65, 0.2, 0.95),
    "megatron of 2021.launch": (9.3e-4, 0.5, 1), "megatron of 2021.launch_tensor": (4e-5, 0.7, 1),
    "megatron of 2021.traffic": (1.5, 0.25, 9), "megatron of 2021.hidden": (0.2, 0.7, 1),
    "megatron of 2021.hidden_most": (0.5, 0.5, 0.99), "megatron of 2021.exposed_sends": (0.3, 0.7, 1),
    "nanotron.launch": (1.3e-3, 0.5, 1), "nanotron.launch_tensor": (1.8e-4, 0.7, 1), "nanotron.traffic": (5.0, 0.25, 9),
    "nanotron.hidden": (0.5, 0.7, 1), "nanotron.hidden_most": (0.5, 0.5, 0.99),
    "composer.launch": (3e-4, 0.5, 1), "composer.traffic": (1.2, 0.25, 9), "composer.hidden": (0.7, 0.3, 1),
    "composer.hidden_most": (0.75, 0.5, 0.99),
    "internevo.hidden": (0.3, 0.7, 1), "internevo.hidden_most": (0.7, 0.5, 0.99),
    "megatron.launch": (2e-4, 0.4, 1), "megatron.traffic": (1.3, 0.3, 9), "megatron.hidden": (0.5, 0.5, 1),
    "megatron.hidden_most": (0.8, 0.3, 0.99), "megatron.hidden_tensor": (0.5, 0.4, 0.95),
    "megatron.exposed_sends": (0.2, 0.7, 1), "logit_traffic": (30.0, 0.4, 1e9),
}  # fmt: skip
KINDS = {
    "A100": ("A100", "A800"),
    "H100": ("H100", "H200"),
    "V100": ("V100",),
    "B200": ("B200", "B300", "GB200", "GB3"),
}
ALIKE = {"torchtitan": "composer", "megatron without overlap": "megatron"}
TRUST = 0.03  # in the expectations, against the data
DRAWN = 0.01  # errors beyond which a run counts less than its square
DENSE_ONLY = ("Megatron-Bridge",)  # sources whose mixtures of experts are left out: kernels change by the month


def cases(path: Path) -> tuple[list[Case], list[Case]]:
    """(those to fit, those to test): dense models whose step is published and not doubted."""
    halves: tuple[list[Case], list[Case]] = ([], [])
    for _, row in read_rows(path):
        seconds = measured_seconds(dict(row))
        if not seconds or not clean(dict(row)):
            continue
        try:
            setting = setting_of(row)
        except UserError:
            continue
        dense = setting.shape.mixture is None and setting.work.tuning == "full"
        kind = next((k for k, names in KINDS.items() if setting.cluster.device.name.startswith(names)), None)
        named = setting.software.name in {name.split(".")[0] for name in PRIORS} | set(ALIKE)
        if kind and named and (dense or not any(name in row["source"] for name in DENSE_ONLY)):
            halves[held_out(row)].append((str(row["source"])[:40], kind, setting, seconds))
    return halves


def predicted(case: Case, numbers: Numbers) -> float:
    """Seconds of a step by these numbers."""
    _, kind, setting, _ = case
    own = {name.split(".")[1]: value for name, value in numbers.items() if name.startswith(f"{kind}.")}
    if setting.cluster.device.name.startswith(("B300", "GB3")):
        own |= {name: own[name] * numbers["ultra"] for name in ("matmul", "low_matmul", "fp4_matmul")}
    own["bandwidth"] = 0.8 if kind == "B200" else 0.85
    efficiency = Efficiency(**own, network=numbers["network"])
    name = ALIKE.get(setting.software.name, setting.software.name)
    does = {key.split(".")[1]: value for key, value in numbers.items() if key.startswith(f"{name}.")}
    if setting.software.name == "megatron without overlap":
        does["hidden_tensor"] = 0.0
    software = replace(setting.software, **does, logit_traffic=numbers["logit_traffic"])  # type: ignore[arg-type]
    return step_time(replace(setting, software=software), efficiency).total


def fit(fitted: list[Case]) -> dict[str, float]:
    """The numbers for which the logarithms of predicted over measured are least; every source counts the same."""
    names = list(PRIORS)
    centres, spreads, most = (np.array([PRIORS[name][i] for name in names]) for i in range(3))
    count: dict[str, int] = defaultdict(int)
    for source, *_ in fitted:
        count[source] += 1

    def residuals(logs: np.ndarray) -> np.ndarray:
        numbers = dict(zip(names, np.exp(logs), strict=True))
        errors = [math.log(predicted(case, numbers) / case[3]) / math.sqrt(count[case[0]]) for case in fitted]
        return np.concatenate([np.array(errors) / DRAWN / 10, TRUST * (logs - np.log(centres)) / spreads])

    start = np.minimum(np.log(centres), np.log(most) - 1e-3)
    bounds = (np.full(len(names), -25.0), np.log(most))
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1, max_nfev=15)
    return {name: float(f"{value:.3g}") for name, value in zip(names, np.exp(found.x), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    fitted, rest = cases(parser.parse_args().file)
    numbers = fit(fitted)
    for name, value in numbers.items():
        print(f"{name:<34} {value:>10.4g}   expected {PRIORS[name][0]:g}")
    for title, half in (("fitted", fitted), ("not fitted", rest)):
        errors: dict[str, list[float]] = defaultdict(list)
        for case in half:
            errors[case[0]].append(abs(predicted(case, numbers) / case[3] - 1))
        print(f"\n{title:<42} runs    mean  median")
        for source, found in sorted(errors.items()):
            print(f"{source:<42} {len(found):>4} {mean(found):>7.1%} {median(found):>7.1%}")


if __name__ == "__main__":
    main()
