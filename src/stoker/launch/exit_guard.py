"""Ends a process that hangs or waits for a hung one, so that its launcher restarts all of them."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress

from stoker.files import no_link
from stoker.launch.first_failure import failure_of_hang
from stoker.launch.run_spec import RunSpec
from stoker.resilience.heartbeat import Heart
from stoker.resilience.stack_dumps import stack_file
from stoker.resilience.watchdog import WAITED_FOR, Hung, hung

EVERY = 1.0  # seconds between two checks
REPORT = 30.0  # seconds that the report of a hang may take
PATIENT = "prepare"  # the phase in which a process may read and tokenise data for hours


def start_exit_guard(heart: Heart, spec: RunSpec, rank: int) -> None:
    """Starts a thread that ends this process with exit code 1 after `faults.hang` seconds without a sign of life."""
    threading.Thread(target=_look, args=(heart, spec, rank), daemon=True, name="guard").start()


def own_hang(heart: Heart, spec: RunSpec, rank: int) -> Hung | None:
    """Returns this process if its heartbeat has timed out; see `stoker.resilience.watchdog.hang_timeout`."""
    pulse = heart.pulse
    if pulse is None or pulse.phase == PATIENT:
        return None
    longest = {phase: getattr(pulse, phase) for phase in WAITED_FOR}
    found = hung({rank: pulse}, now=time.monotonic(), hang=spec.loaded.job.faults.hang, longest=longest)
    return found[0] if found else None


def _look(heart: Heart, spec: RunSpec, rank: int) -> None:
    while (found := own_hang(heart, spec, rank)) is None:
        time.sleep(EVERY)
    failure = failure_of_hang(rank, os.getpid(), phase=found.phase, step=found.step, silent=found.silent)
    last = threading.Timer(REPORT, os._exit, (1,))  # the disk may be what hangs
    last.daemon = True
    last.start()
    with suppress(OSError):
        if spec.output.is_dir():
            spec.logs.mkdir(exist_ok=True)
            with open(stack_file(spec.logs, rank), "a", opener=no_link) as file:
                faulthandler.dump_traceback(file, all_threads=True)
            failure.write(spec.failure_of(rank))
    with suppress(OSError):
        print(
            f"error: rank {rank}: {failure.problems[0]}; its stack is in {stack_file(spec.logs, rank)}",
            file=sys.stderr,
            flush=True,
        )
    os._exit(1)  # the teardown of an orderly exit waits for the other processes
