"""Imported only by the server that a run's processes are forked from: installs its signal handling.

The server ends with the process that started it. Signals that end a run do not end the server first: a
scheduler may send them to every process. The forked processes install handlers before they unblock the signals.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys

from stoker.hardware.process.parent_process import PR_SET_PDEATHSIG

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.setsid()
os.environ.pop("PYTHONSAFEPATH", None)  # has done its work here; scripts that user code starts may need their folder
logging.disable(logging.WARNING)  # libraries' messages at import would appear in the terminal
gc.disable()  # it takes a fifth of the imports; `forkserver_ready` enables it
