"""`offload_idle`: what idles lies elsewhere meanwhile, and nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running import assert_same_state, run
from test_own_critic import reward_run
from torch import Tensor

from stoker.train.prepared import Prepared


class Seen:
    """What lies on the device when answers are scored."""

    def __init__(self) -> None:
        self.prepared: Prepared | None = None
        self.critic: list[bool] = []

    def __call__(self, answer: str, expected: object, row: object) -> float:
        assert self.prepared is not None
        critic = self.prepared.task.language.critic  # type: ignore[attr-defined]
        self.critic.append(all(_is_here(p) for p in critic.language.model.parameters()))
        return answer.count("e") / 8


def _is_here(tensor: Tensor) -> bool:
    return tensor.untyped_storage().size() > 0


@pytest.fixture
def seen() -> Iterator[Seen]:
    module, found = ModuleType("seen_rewards"), Seen()
    module.look = found  # type: ignore[attr-defined]
    sys.modules["seen_rewards"] = module
    yield found
    del sys.modules["seen_rewards"]


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit_with_what_idles_elsewhere(ppo: dict[str, Any], base: Path, seen: Seen) -> None:
    """With a critic and a reward run of their own, over two iterations and an evaluation."""
    reward_run(base, ppo)
    block = {**ppo["ppo"], "reward": "rm", "critic": "rm", "rewards": "python:seen_rewards:look"}
    job = {**ppo, "tune": "full", "steps": 4, "ppo": block, "evaluate": {"fraction": 0.2, "every": 2}}

    def before(prepared: Prepared) -> None:
        seen.prepared = prepared

    usual = run(base, {**job, "output": "usual"}, before=before)
    assert seen.critic and all(seen.critic)
    seen.critic.clear()
    moved = run(base, {**job, "output": "moved"}, "ppo.offload_idle=true", before=before)
    assert seen.critic and not any(seen.critic)
    assert moved.losses == usual.losses
    assert_same_state(moved.last_state(), usual.last_state())
    warned = [e["what"] for e in moved.folder.read_events() if "offload_idle" in str(e)]
    assert len(warned) == 1 and not [e for e in usual.folder.read_events() if "offload_idle" in str(e)]
