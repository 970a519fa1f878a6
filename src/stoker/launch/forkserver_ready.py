"""Imported last by the server that a run's processes are forked from: what was imported stays until their end.

Garbage collections of the processes do not look through it, which would also copy its pages into each of them.
"""

from __future__ import annotations

import gc

gc.freeze()
gc.enable()
