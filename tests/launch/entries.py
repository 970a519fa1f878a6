"""What the processes of a test's run do in place of training."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from stoker.errors import CannotRun, Interrupted, Problem, RunFailed, UserError
from stoker.job import load_job
from stoker.launch import forkserver, processes, worker_main
from stoker.launch.cluster_env import RankInfo
from stoker.launch.process_group import process_group, share_cores
from stoker.launch.run_spec import RunSpec
from stoker.launch.shrink import leave_out
from stoker.launch.supervisor import train_here
from stoker.resilience import driver_log
from stoker.resilience.driver_log import write_address
from stoker.resilience.heartbeat import Heart
from stoker.resilience.stop_signals import STOPS
from stoker.runs.shm_folder import shared_folder
from stoker.train.run_result import RunResult


def ending(state: str, step: int, number: int | None = None) -> RunResult:
    return RunResult(
        state, step, 10, number, 2.0, 1.0, None, None, None, None, True, 0 if state == "done" else 128 + (number or 0)
    )


def answer(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Talks to the others, prints to the log and to the display, and gives the sum of the ranks as the step."""
    share_cores(rank_info.local_world)
    total = torch.tensor(rank_info.rank)
    with process_group(
        torch.device("cpu"), rank=rank_info.rank, world=rank_info.world, store=rank_info.store(), timeout=60
    ):
        dist.all_reduce(total)
    print(f"printed by {rank_info.rank} with {torch.get_num_threads()} threads")
    print("a warning", file=sys.stderr)
    if console is not None:
        console.print("the display")
    return ending("done", int(total))


def wait_together(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Says that it is there, then waits for the others in a collective until the step that never comes."""
    with process_group(
        torch.device("cpu"), rank=rank_info.rank, world=rank_info.world, store=rank_info.store(), timeout=600
    ):
        (spec.base / f"pid-{rank_info.rank}").write_text(str(os.getpid()))
        if rank_info.rank == 1:
            time.sleep(600)
        dist.barrier()
    raise AssertionError


def wait_deaf(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Waits where no signal but SIGKILL reaches it, as in a collective."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    (spec.base / f"pid-{rank_info.rank}").write_text(str(os.getpid()))
    time.sleep(600)
    raise AssertionError


def hang_deaf(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Rank 1 fails while rank 0 waits so."""
    if rank_info.rank == 0:
        return wait_deaf(spec, rank_info=rank_info, console=console)
    (spec.base / "pid-1").write_text(str(os.getpid()))
    while not (spec.base / "pid-0").exists():
        time.sleep(0.02)
    raise ZeroDivisionError("a bug")


def stop_when_asked(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Stops as the loop does: after a step, with an outcome."""
    asked: list[int] = []
    for number in STOPS:
        signal.signal(number, lambda n, _: asked.append(n))
    (spec.base / f"pid-{rank_info.rank}").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.02)
    time.sleep(0.3)
    (spec.base / f"asked-{rank_info.rank}").write_text(repr(asked))
    return ending("stopped", 3, asked[0])


def refuse_together(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Every rank finds the same mistake, one of them later than the other."""
    with process_group(
        torch.device("cpu"), rank=rank_info.rank, world=rank_info.world, store=rank_info.store(), timeout=60
    ):
        dist.barrier()
    time.sleep(0.3 * rank_info.rank)
    raise UserError(Problem("no such thing", "write another", key="train.lr", file="job.yaml", line=2, column=1))


def fail_after_a_peer(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Rank 1 cannot go on; what the others say when it has gone is not reported."""
    with process_group(
        torch.device("cpu"), rank=rank_info.rank, world=rank_info.world, store=rank_info.store(), timeout=600
    ):
        if rank_info.rank == 1:
            raise RunFailed("the disk is full")
        dist.barrier()
    raise AssertionError


def fail_without_a_disk(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Rank 1 cannot go on, and cannot write why, once the other one has its log."""
    there = spec.base / "there"
    if rank_info.rank == 1:
        while not there.exists():
            time.sleep(0.02)
        shutil.rmtree(spec.logs)
        spec.logs.touch()
        raise RunFailed("the disk is gone")
    there.touch()
    time.sleep(600)
    raise AssertionError


def step_to(spec: RunSpec, *, rank_info: RankInfo, last: int, at: int) -> Heart:
    """Steps with signs of life, from the one after the last of an earlier start to ``at``."""
    heart = Heart(shared_folder(spec.output), rank_info.rank)
    kept = spec.base / f"steps-{rank_info.rank}"
    done = int(kept.read_text()) if kept.exists() else 0
    heart.restored(done)
    for step in range(done + 1, min(at, last) + 1):
        for phase in ("data", "train", "optimizer"):
            heart.beat(phase, step)
            time.sleep(0.02)
        kept.write_text(str(step))
        heart.beat("save", step)
    return heart


def die_once_and_again(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Rank 1 dies at steps 3 and 6, each time once, when rank 0 is there too."""
    for at in (3, 6):
        step_to(spec, rank_info=rank_info, last=10, at=at)
        mark = spec.base / f"died-{at}"
        if not mark.exists():
            if rank_info.rank == 0:
                (spec.base / f"waits-{at}").touch()
                time.sleep(600)
            while not (spec.base / f"waits-{at}").exists():
                time.sleep(0.02)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    step_to(spec, rank_info=rank_info, last=10, at=10)
    return ending("done", 10)


def lose_the_memory(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Something removes what lies in shared memory while a step is done; then a bug comes up, once."""
    first = spec.base / f"first-{rank_info.rank}"
    if first.exists():
        step_to(spec, rank_info=rank_info, last=10, at=10)
        return ending("done", 10)
    first.touch()
    step_to(spec, rank_info=rank_info, last=10, at=3)
    if rank_info.rank == 0:
        shutil.rmtree(shared_folder(spec.output))
        time.sleep(0.5)  # several looks
        raise ZeroDivisionError("a bug")
    time.sleep(600)
    raise AssertionError


def die_always(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """The second process dies as soon as it is there; with one process all is well."""
    with (spec.base / "starts").open("a") as file:
        file.write(f"{rank_info.rank} of {rank_info.world}\n")
    if rank_info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank_info.world == 2:
        time.sleep(600)
    return ending("done", 2)


def fail_at_a_step(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """A bug at every attempt of step 4."""
    with (spec.base / f"starts-{rank_info.rank}").open("a") as file:
        file.write("x")
    step_to(spec, rank_info=rank_info, last=10, at=3)
    raise ZeroDivisionError("a bug")


def refuse_at_a_step(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """The user's own code, as a reward, fails in step 4."""
    step_to(spec, rank_info=rank_info, last=10, at=3)
    raise UserError("the reward returned nan")


def hang_once(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """Rank 1 stops in its own work in step 4, while the others wait in a collective."""
    with process_group(
        torch.device("cpu"), rank=rank_info.rank, world=rank_info.world, store=rank_info.store(), timeout=600
    ):
        heart = step_to(spec, rank_info=rank_info, last=10, at=3)
        for step in range(4, 7):
            heart.beat("train", step)
            if rank_info.rank == 1 and not (spec.base / "hung").exists():
                (spec.base / "hung").touch()
                its_own_work()
            dist.barrier()
            heart.beat("optimizer", step)
            heart.beat("save", step)
    return ending("done", 6)


def its_own_work() -> None:
    time.sleep(600)


def bad_device(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """The second device does not pass its test."""
    if rank_info.world == 2:
        if rank_info.rank == 0:
            leave_out(spec, [1])
        raise CannotRun("device 1 computes wrong matrix products")
    return ending("done", 2)


def lose_gpu(spec: RunSpec, *, rank_info: RankInfo, console: Console | None) -> RunResult:
    """The kernel logs that the second process' GPU has gone, and that process dies; with one process all is well."""
    if rank_info.world == 1:
        return ending("done", 2)
    write_address(shared_folder(spec.output), rank_info.rank, f"0000:{rank_info.rank:02x}:00")
    if rank_info.rank == 1:
        xid = (spec.base / "xid").read_text()
        with (spec.base / "log").open("a") as file:
            file.write(
                f"[ {time.monotonic():.6f}] NVRM: Xid (PCI:0000:01:00): {xid}, pid={os.getpid()}, name=\x1b[2J\n"
            )
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    raise AssertionError


ENTRIES: dict[str, Callable[..., RunResult]] = {
    entry.__name__: entry
    for entry in (
        answer,
        wait_together,
        wait_deaf,
        hang_deaf,
        stop_when_asked,
        refuse_together,
        fail_after_a_peer,
        fail_without_a_disk,
        die_once_and_again,
        lose_the_memory,
        die_always,
        fail_at_a_step,
        refuse_at_a_step,
        hang_once,
        bad_device,
        lose_gpu,
    )
}


def main(name: str, *arguments: Any) -> None:
    """A process of the run, which calls an entry where it would train."""
    worker_main.train = ENTRIES[name]
    worker_main.main(*arguments)


def start(name: str) -> int:
    """``stoker train job.yaml`` with another entry: prints the outcome or the error, gives the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    forkserver.PRELOADED[1:], forkserver.FOR_LANGUAGE[:] = ["stoker.launch.worker_main"], []  # the entries need no more
    driver_log.has_nvidia_driver = lambda: name == "lose_gpu"
    processes.main = partial(main, name)
    spec = RunSpec(load_job("job.yaml"), Path.cwd(), Path.cwd() / "run")
    try:
        got = train_here(spec, nccl=False)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return error.exit_code
    except Interrupted as interrupted:
        return 128 + interrupted.number
    print(got.state, got.step)
    return got.exit_code
