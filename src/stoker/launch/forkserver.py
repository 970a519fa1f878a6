"""The fork server of a run's and a pool's processes: it imports their modules while this process continues.

A process has one such server, which is started on first use.

Light to import, so that it can be started before anything else is loaded.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext

from stoker.hardware.machine_limits import check_limits
from stoker.hardware.processor import has_cuda_driver

# On other systems forks conflict with threads that libraries start. So they do if a library asks CUDA for its devices
# when it is imported, as bitsandbytes and torchao do: a fork of that process can use none (`has_cuda_driver`).
FORKS = sys.platform == "linux" and not has_cuda_driver()
CONTEXT: ForkServerContext | SpawnContext = get_context("forkserver") if FORKS else get_context("spawn")
# Modules that it loads once, which would take seconds in each process.
PRELOADED = ["stoker.launch.forkserver_preload", "stoker.launch.worker", "torch.distributed.checkpoint"]
FOR_LANGUAGE = ["stoker.train.language.prepare_language", "torch.distributed.pipelining"]  # with transformers and peft


def wait_for_server() -> None:
    """Waits until the server has imported everything; the first forked process would wait for that.

    One of several supervisors must not wait, as its peers would time out.
    """
    if FORKS:
        process = CONTEXT.Process(target=_nothing)
        process.start()
        process.join()


def _nothing() -> None:
    pass


def start_server(*, language: bool = True) -> None:
    """Starts the server if it does not run yet; called from the main thread, with which it ends.

    Args:
        language: whether its processes will need language models.

    Raises:
        RunFailed: this shell allows it too little.
    """
    check_limits()
    if FORKS:
        from multiprocessing import forkserver

        modules = [*PRELOADED, *(FOR_LANGUAGE if language else ()), "stoker.launch.forkserver_ready"]
        CONTEXT.set_forkserver_preload(modules)
        forkserver.ensure_running()
