"""Imported by the server that a run's processes are forked from, and nowhere else: how it ends, and how it does not.

The server ends with the process that started it, and the signals that end a run do not end the server first: a
scheduler may send them to every process that there is. The processes have handlers before they let them through.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from stoker.hardware.process import PR_SET_PDEATHSIG

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.setsid()
os.environ.pop("PYTHONSAFEPATH", None)  # has done its work here; scripts that user code starts may need their folder
logging.disable(logging.WARNING)  # libraries' messages at import would appear in the terminal
