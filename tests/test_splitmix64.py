"""SplitMix64 against published numbers."""

from __future__ import annotations

import numpy as np

from stoker.splitmix64 import GOLDEN, mix64


def test_mixed_states_are_the_published_outputs() -> None:
    """The first outputs for the seed 1234567, as published with the generator (rosettacode.org, SplitMix64)."""
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * GOLDEN
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
