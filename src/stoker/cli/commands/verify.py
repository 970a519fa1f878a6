"""Test on a small copy of the job that a layout computes the same as one process and as a plain PyTorch loop."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from stoker.cli.preflight import open_job, with_planned_layout
from stoker.errors import Problem, UserError
from stoker.job import LoadedJob
from stoker.job.load_job import block_problems

if TYPE_CHECKING:
    from stoker.verify.difference import TraceComparison
    from stoker.verify.layout_cases import Cell
    from stoker.verify.verdict import Verdict

MOST_PROCESSES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker verify``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    parser.add_argument(
        "--layouts",
        default="planned",
        metavar="planned|all|FILE",
        help="the job's layout (default), a matrix of all kinds of layouts, or a YAML list of `parallel:` blocks",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="optimizer steps of each run (default: 5; 8 with wsd; 3 if a step has many rows)",
    )
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first difference")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to run on (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Verifies; returns 0 if all layouts compute the same, else 1. Of the matrix, layouts that are impossible for the
    job do not count.
    """
    base = Path.cwd()
    if arguments.steps is not None and arguments.steps < 1:
        raise UserError(f"--steps {arguments.steps}: give at least 1")
    loaded = with_planned_layout(open_job(arguments.job, arguments.overrides, "open"))
    _check_comparable(loaded)
    # For child processes: torch's C++ warnings are irrelevant to the layouts.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    from stoker.launch.process_pool import Pool
    from stoker.verify.toy_job import make_twin
    from stoker.verify.verifier import Verifier

    cells = _cells(arguments.layouts, loaded)
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device cuda: there is no CUDA device here; write --device cpu")
        largest = torch.cuda.device_count()
    else:
        largest = min(MOST_PROCESSES, max(cell.world for cell in cells))
    with TemporaryDirectory(prefix="stoker-verify-") as folder, Pool(largest, device=arguments.device) as pool:
        twin = make_twin(loaded, base, Path(folder), steps=arguments.steps)
        verifier = Verifier(twin, pool, fail_fast=arguments.fail_fast)
        if not arguments.json:
            print(f"twin      {twin.describe(cells[0])}; {twin.steps(cells[0])} steps in float64")
            for fact in twin.facts:
                print(f"          {fact}")
            print(f"bound     {verifier.bound:.0e}, the maximum difference from one process and from a plain loop\n")
        verdicts = []
        for cell in cells:
            verdict = verifier.verdict(cell)
            verdicts.append(verdict)
            if not arguments.json:
                print(_lines(verdict), flush=True)
    counted = [v for v in verdicts if v.passed is not None] if arguments.layouts == "all" else verdicts
    passed = bool(counted) and all(v.passed for v in counted)
    if arguments.json:
        print(json.dumps({"passed": passed, "layouts": [verdict.as_json() for verdict in verdicts]}))
    else:
        print(f"\n{_summary(verdicts)}")
    return 0 if passed else 1


def _check_comparable(loaded: LoadedJob) -> None:
    """Rejects jobs whose steps differ from those of one process on the same rows."""
    parallel = loaded.job.parallel
    changing = {"sync.every": (parallel.sync.every > 1, 1), "compress": (parallel.compress != "none", "none")}
    for key, (differs, plain) in changing.items():
        if differs:
            message = f"`stoker verify` compares steps with those of one process, and `{key}` changes them"
            hint = f"add parallel.{key}={plain} to verify the layout"
            raise UserError(loaded.problem(f"parallel.{key}", message, hint))


def _cells(layouts: str, loaded: LoadedJob) -> list[Cell]:
    from stoker.verify.layout_cases import MATRIX, Cell, job_case

    if layouts == "all":
        return list(MATRIX)
    if layouts == "planned":
        cell = job_case(loaded)
        if cell.world == 1:
            print("the job trains in one process: only its split of the batch can be verified", file=sys.stderr)
        return [cell]
    from stoker.job.document.text_file import read_text
    from stoker.job.document.yaml_document import parse_document

    document = parse_document(read_text(layouts), file=layouts)
    blocks = document.data
    if not (isinstance(blocks, list) and blocks and all(isinstance(block, dict) for block in blocks)):
        message = "the file does not contain a list of `parallel:` blocks"
        raise UserError(Problem(message, "start each with a dash: `- {data: 2, shard: zero2}`", file=layouts))
    problems = [problem for number in range(len(blocks)) for problem in block_problems("parallel", document, number)]
    if problems:
        raise UserError(*problems)
    return [Cell(", ".join(f"{key} {value}" for key, value in block.items()), block) for block in blocks]


def _lines(verdict: Verdict) -> str:
    name = verdict.cell.name if verdict.layout is None else verdict.layout.describe()
    if verdict.comparison is None and not verdict.checks:
        word = "invalid" if verdict.passed is None else "FAILED"
        return f"{name:<44} {word}: {verdict.reason}"
    end = "same" if verdict.passed else f"DIFFERS: {verdict.reason}"
    sizes = f"{_sizes(verdict.comparison)}  " if verdict.comparison else ""
    lines = [f"{name:<44} {sizes}{end}  ({verdict.seconds:.1f} s)"]
    for check in verdict.checks:
        found = {True: "same", False: f"DIFFERS: {check.reason}", None: f"not compared: {check.reason}"}[check.passed]
        sizes = f"{_sizes(check.comparison)}  " if check.comparison else ""
        lines.append(f"  {check.name:<42} {sizes}{found}")
    return "\n".join([*lines, *(f"  {fact}" for fact in verdict.facts)])


def _sizes(found: TraceComparison) -> str:
    kinds = {"loss": "loss", "gradient norm": "norm", "gradient": "gradients", "weight": "weights"}
    kinds["evaluation loss"] = "evaluation"
    return "  ".join(f"{name} {found.size(kind):.0e}" for kind, name in kinds.items())


def _summary(verdicts: list[Verdict]) -> str:
    same, differ = sum(v.passed is True for v in verdicts), sum(v.passed is False for v in verdicts)
    refused = len(verdicts) - same - differ
    words = [f"{same} of {len(verdicts)} layouts compute the same as one process"]
    words += [f"{differ} do not"] if differ else []
    words += [f"{refused} are invalid"] if refused else []
    return ", ".join(words)
