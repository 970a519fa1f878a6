"""Train with injected faults and compare the result with an undisturbed run. Exit code 0 if equal, 1 if not."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.preflight import open_job, with_planned_layout
from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from stoker.job import LoadedJob
    from stoker.rehearse.rehearsal import Rehearsal, Trial
    from stoker.resilience.fault_injection import Fault
    from stoker.runs.run_folder import RunFolder

PLACE = re.compile(r"(\d+)@(\d+)")
PLACE_AND_FACTOR = re.compile(r"(\d+)@(\d+):(\d+(?:\.\d+)?)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker chaos``."""
    parser.add_argument("job", metavar="JOB", help="the job file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the job to override")
    for option, metavar, what in (
        ("--kill", "RANK@STEP", "kill -9 this process at this step"),
        ("--hang", "RANK@STEP", "suspend this process at this step, so that it hangs"),
        ("--slow", "RANK@STEP:FACTOR", "slow this process down by FACTOR for some steps"),
        ("--nan", "STEP", "make the loss and the gradient of this step non-finite, once"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=what)
    parser.add_argument(
        "--corrupt-checkpoint",
        action="append_const",
        const=None,
        default=[],
        help="after the second checkpoint: corrupt the newest checkpoint on disk, drop the copies in memory, and kill "
        "rank 0",
    )
    parser.add_argument(
        "--corrupt-at",
        action="append",
        default=[],
        metavar="RANK@STEP",
        help="the same at this step, killing this process",
    )
    parser.add_argument(
        "--fill-disk",
        action="append_const",
        const=None,
        default=[],
        help="fail with a full disk when rank 0 writes the first checkpoint",
    )
    parser.add_argument(
        "--fill-at",
        action="append",
        default=[],
        metavar="RANK@STEP",
        help="the same for this process, at the first checkpoint after this step",
    )
    parser.add_argument(
        "--kill-node",
        action="append",
        default=[],
        metavar="NODE@STEP",
        help="kill -9 the supervisor and all processes of this node (counted from 0); it returns a second later",
    )
    parser.add_argument(
        "--cut-link",
        action="append",
        default=[],
        metavar="NODE@STEP:SECONDS",
        help="cut all connections between this node and the others for SECONDS",
    )
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
    from stoker.cli.report import quiet_libraries

    quiet_libraries()
    faults = _stated(arguments)  # before any training
    loaded = with_planned_layout(open_job(arguments.job, arguments.overrides))
    from stoker.rehearse.rehearsal import Rehearsal

    say: Callable[[str], None] = _silent if arguments.json else _say
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

    faults = [Fault("kill", step, rank) for rank, step in (_place("--kill", text) for text in arguments.kill)]
    faults += [Fault("hang", step, rank) for rank, step in (_place("--hang", text) for text in arguments.hang)]
    for text in arguments.slow:
        match = PLACE_AND_FACTOR.fullmatch(text)
        if match is None or float(match[3]) <= 1:
            raise UserError(Problem(f"--slow {text}: not of the form RANK@STEP:FACTOR", "write it as 1@20:3"))
        faults.append(Fault("slow", _step("--slow", text, match[2]), int(match[1]), float(match[3])))
    for text in arguments.nan:
        if not text.isdecimal():
            raise UserError(Problem(f"--nan {text}: not a step", "write it as --nan 20"))
        faults.append(Fault("nan", _step("--nan", text, text)))
    faults += [Fault("corrupt", 0) for _ in arguments.corrupt_checkpoint]
    faults += [Fault("corrupt", step, rank) for rank, step in (_place("--corrupt-at", t) for t in arguments.corrupt_at)]
    faults += [Fault("fill-disk", 0) for _ in arguments.fill_disk]
    faults += [Fault("fill-disk", step, rank) for rank, step in (_place("--fill-at", t) for t in arguments.fill_at)]
    for text in arguments.kill_node:
        number, step = _place("--kill-node", text, "NODE")
        faults.append(Fault("kill-node", step, node=str(number)))
    for text in arguments.cut_link:
        match = PLACE_AND_FACTOR.fullmatch(text)
        if match is None or float(match[3]) <= 0:
            raise UserError(Problem(f"--cut-link {text}: not of the form NODE@STEP:SECONDS", "write it as 1@20:5"))
        step = _step("--cut-link", text, match[2])
        faults.append(Fault("cut-link", step, node=match[1], seconds=float(match[3])))
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
    count = arguments.nodes or (stated.max if stated is not None else max(2, *(number + 1 for number in named), 2))
    world = layout_of(loaded.job).world
    if not 1 < count <= world:
        words = f"{count} nodes cannot be simulated: the job has {world} process{'es' * (world > 1)}"
        raise UserError(Problem(f"{words}, and each node needs at least one", "write parallel.data, or --nodes"))
    return count


def _place(option: str, text: str, what: str = "RANK") -> tuple[int, int]:
    match = PLACE.fullmatch(text)
    if match is None:
        raise UserError(Problem(f"{option} {text}: not of the form {what}@STEP", f"write it as {option} 1@20"))
    return int(match[1]), _step(option, text, match[2])


def _step(option: str, text: str, step: str) -> int:
    if int(step) < 1:
        raise UserError(Problem(f"{option} {text}: there is no step 0", "steps count from 1"))
    return int(step)


def _save_every(calm: RunFolder) -> int:
    started = next(event for event in calm.read_events() if event["event"] == "started")
    return int(started["plan"]["save_every"])


def _placed(faults: list[Fault], save_every: int) -> list[Fault]:
    """Chooses steps for the faults without one."""
    from dataclasses import replace

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


def _silent(_: str) -> None:
    pass


def _say(text: str) -> None:
    print(text, flush=True)


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
