"""Train with injected faults and compare the result with an undisturbed run. Exit code 0 if equal, 1 if not."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.preflight import open_job, with_planned_layout
from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from stoker.job import LoadedJob
    from stoker.rehearse.rehearsal import Rehearsal, Trial
    from stoker.resilience.fault_injection import Fault, Kind
    from stoker.runs.run_folder import RunFolder

NUMBER = r"\d+(?:\.\d+)?"
PARTS = {  # of an option's value: the pattern, and an example
    "RANK": (r"\d+", "1"),
    "NODE": (r"\d+", "1"),
    "STEP": (r"\d+", "20"),
    "FACTOR": (NUMBER, "3"),
    "SECONDS": (NUMBER, "5"),
}
ABOVE = {"FACTOR": 1, "SECONDS": 0}
FAULTS: dict[str, tuple[Kind, str, str]] = {  # by option: the kind, the form of a value, the help
    "--kill": ("kill", "RANK@STEP", "kill -9 this process at this step"),
    "--hang": ("hang", "RANK@STEP", "suspend this process at this step, so that it hangs"),
    "--slow": ("slow", "RANK@STEP:FACTOR", "slow this process down by FACTOR for some steps"),
    "--nan": ("nan", "STEP", "make the loss and the gradient of this step non-finite, once"),
    "--corrupt-at": ("corrupt", "RANK@STEP", "as --corrupt-checkpoint, at this step, killing this process"),
    "--fill-at": (
        "fill-disk",
        "RANK@STEP",
        "as --fill-disk, for this process, at the first checkpoint after this step",
    ),
    "--kill-node": (
        "kill-node",
        "NODE@STEP",
        "kill -9 the supervisor and all processes of this node (counted from 0); it returns a second later",
    ),
    "--cut-link": (
        "cut-link",
        "NODE@STEP:SECONDS",
        "cut all connections between this node and the others for SECONDS",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker chaos``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the job to override")
    for option, (_, form, what) in FAULTS.items():
        parser.add_argument(option, action="append", default=[], metavar=form, help=what)
    for option, what in (
        (
            "--corrupt-checkpoint",
            "after the second checkpoint: corrupt the newest checkpoint on disk, drop the copies in memory, and kill "
            "rank 0",
        ),
        ("--fill-disk", "fail with a full disk when rank 0 writes the first checkpoint"),
    ):
        parser.add_argument(option, action="append_const", const=None, default=[], help=what)
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="COUNT",
        help="number of nodes, simulated on loopback addresses (default: faults.nodes.max, else the number that the "
        "faults need, at least 2)",
    )
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="number of random faults, of any kind")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed for --random (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Rehearses; returns 0 if the run with faults ended as the run without them, else 1."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    faults = _stated(arguments)  # before any training
    loaded = with_planned_layout(open_job(arguments.job, arguments.overrides, "open"))
    from stoker.rehearse.rehearsal import Rehearsal

    say: Callable[[str], None] = (lambda _: None) if arguments.json else partial(print, flush=True)
    nodes = _nodes(arguments, loaded, faults)
    rehearsal = Rehearsal(loaded, arguments.job, arguments.overrides, base=Path.cwd(), say=say, nodes=nodes)
    rehearsal.check(faults)
    calm = rehearsal.undisturbed()
    every = _save_every(calm)
    faults = _placed(faults, every) + _drawn(arguments, rehearsal, calm, every)
    trial = rehearsal.disturbed(calm, sorted(faults, key=lambda fault: fault.step))
    if arguments.json:
        print(json.dumps(_answer(trial), indent=2))
    else:
        _print(trial)
    return 0 if trial.survived else 1


def _stated(arguments: argparse.Namespace) -> list[Fault]:
    """Returns the faults of the command line; step 0 if none is given."""
    from stoker.resilience.fault_injection import Fault

    faults = [
        _fault(option, text)
        for option in FAULTS
        for text in getattr(arguments, option.removeprefix("--").replace("-", "_"))
    ]
    faults += [Fault("corrupt", 0) for _ in arguments.corrupt_checkpoint]
    faults += [Fault("fill-disk", 0) for _ in arguments.fill_disk]
    if not faults and arguments.random < 1:
        raise UserError(Problem("no fault is given", "write for example --kill 0@20, or --random 5"))
    return faults


def _nodes(arguments: argparse.Namespace, loaded: LoadedJob, faults: list[Fault]) -> int:
    """Returns the number of nodes of the run with faults; 1 if no option concerns nodes."""
    from stoker.job.layout import layout_of

    named = [int(fault.node) for fault in faults if fault.node]
    stated = loaded.job.faults.nodes
    if not named and arguments.nodes is None and stated is None:
        return 1
    needed = 1 + max([1, *named]) if stated is None else stated.max
    count = needed if arguments.nodes is None else arguments.nodes
    world = layout_of(loaded.job).world
    if not 1 < count <= world:
        words = f"{count} nodes cannot be simulated: the job has {world} process{'es' * (world > 1)}"
        raise UserError(Problem(f"{words}, and each node needs at least one", "write parallel.data, or --nodes"))
    return count


def _fault(option: str, text: str) -> Fault:
    """Returns the fault that an option describes."""
    from stoker.resilience.fault_injection import Fault

    kind, form, _ = FAULTS[option]
    match = re.fullmatch(re.sub("[A-Z]+", lambda part: f"(?P<{part[0]}>{PARTS[part[0]][0]})", form), text)
    found = match.groupdict() if match is not None else {}
    if not found or any(float(found[part]) <= least for part, least in ABOVE.items() if part in found):
        wrong = "a step" if form == "STEP" else f"of the form {form}"
        example = re.sub("[A-Z]+", lambda part: PARTS[part[0]][1], form)
        raise UserError(Problem(f"{option} {text}: not {wrong}", f"write it as {option} {example}"))
    if int(found["STEP"]) < 1:
        raise UserError(Problem(f"{option} {text}: there is no step 0", "steps count from 1"))
    return Fault(
        kind,
        int(found["STEP"]),
        rank=int(found.get("RANK", 0)),
        factor=float(found.get("FACTOR", 1)),
        node=str(int(found["NODE"])) if "NODE" in found else "",
        seconds=float(found.get("SECONDS", 0)),
    )


def _save_every(calm: RunFolder) -> int:
    started = next(event for event in calm.read_events() if event["event"] == "started")
    return int(started["plan"]["save_every"])


def _placed(faults: list[Fault], save_every: int) -> list[Fault]:
    """Chooses steps for the faults without one."""
    usual = {"corrupt": 2 * save_every + 1, "fill-disk": save_every}
    return [fault if fault.step else replace(fault, step=usual[fault.kind]) for fault in faults]


def _drawn(arguments: argparse.Namespace, rehearsal: Rehearsal, calm: RunFolder, save_every: int) -> list[Fault]:
    if arguments.random < 1:
        return []
    from stoker.rehearse.random_faults import draw_faults

    steps = len(calm.read_metrics())
    try:
        return draw_faults(
            arguments.random,
            seed=arguments.seed,
            steps=steps,
            world=rehearsal.world,
            save_every=save_every,
            kinds=rehearsal.kinds,
            nodes=rehearsal.nodes,
        )
    except ValueError as error:
        raise UserError(
            Problem(f"--random {arguments.random}: {error}", "request fewer faults, or train for more steps")
        ) from error


def _answer(trial: Trial) -> dict[str, Any]:
    split = trial.goodput
    return {
        "survived": trial.survived,
        "undisturbed": str(trial.calm.path),
        "run": str(trial.disturbed.path),
        "exit_code": trial.exit_code,
        "message": trial.message if trial.exit_code else "",
        "faults": [asdict(effect) for effect in trial.effects],
        "equality": {**asdict(trial.equality), "holds": trial.equality.holds},
        "goodput": split and {"effective": split.effective, "wall": split.wall, "parts": split.parts},
    }


def _print(trial: Trial) -> None:
    for effect in trial.effects:
        print(f"  {effect.describe()}")
    same = trial.equality
    if trial.exit_code:
        print(f"the run ended at step {same.reached} of {same.steps}: {trial.message}", file=sys.stderr)
    print(f"losses   {_words(same.loss, same.tolerance)}", end="")
    print(f", from step {same.first_difference} on" if same.first_difference else "")
    print(f"weights  {_words(same.weight, same.tolerance)}")
    print("samples  each used exactly once" if same.samples else "samples  differ from the undisturbed run")
    if trial.goodput is not None:
        print(f"goodput  {trial.goodput.effective:.1%} of {trial.goodput.wall:.0f} s")
    print("survived" if trial.survived else "NOT survived")


def _words(difference: float, tolerance: float) -> str:
    if difference == 0:
        return "bitwise equal"
    return f"{difference:.1e} apart, {'within' if difference <= tolerance else 'beyond'} {tolerance:.0e}"
