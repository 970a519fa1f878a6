"""How often processes are restarted, and when their device is given up; another supervisor continues the counts."""

from __future__ import annotations

import json
from dataclasses import replace

from stoker.errors import Problem
from stoker.job.blocks.faults_block import FaultsBlock
from stoker.launch.first_failure import Failure
from stoker.launch.restart_policy import Again, Restarts

KILLED = Failure(1, 0.0, "exit", (Problem("process 7 was killed by SIGKILL"),))
BUG = Failure(1, 0.0, "ValueError", (Problem("ValueError: a bug"),))


def restarts(most: int = 3) -> Restarts:
    return Restarts(FaultsBlock(restarts=most, back_off=1.0))


def handed_over(policy: Restarts) -> Restarts:
    """The policy of the node that leads next."""
    again = restarts(policy.most)
    again.restore(json.loads(json.dumps(policy.state())))
    return again


def test_the_back_off_doubles_and_only_new_progress_resets_the_count() -> None:
    policy = handed_over(restarts())  # before anything has failed
    assert policy.after(KILLED, done=4, steps=4) == Again(1, 1.0)
    assert policy.after(KILLED, done=4, steps=0) == Again(2, 2.0)
    policy = handed_over(policy)
    assert policy.after(KILLED, done=3, steps=1) == Again(3, 4.0)  # a step that had been done before
    assert policy.after(KILLED, done=5, steps=2) == Again(1, 1.0)
    assert [policy.after(KILLED, done=5, steps=0) is None for _ in range(3)] == [False, False, True]
    assert restarts(0).after(KILLED, done=5, steps=5) is None


def test_a_bug_is_tried_once_more_at_each_step() -> None:
    policy = restarts()
    assert policy.after(BUG, done=4, steps=4) == Again(1, 1.0)
    assert handed_over(policy).after(BUG, done=4, steps=1) is None
    assert handed_over(policy).after(replace(BUG, problems=(Problem("other"),)), done=4, steps=1) == Again(2, 2.0)
    assert handed_over(policy).after(BUG, done=5, steps=1) == Again(1, 1.0)
    assert restarts().after(BUG, done=-1, steps=0) is None  # it comes again before the first step
    policy.reset()
    assert policy.after(BUG, done=4, steps=1) == Again(1, 1.0)  # on other devices


def test_a_device_is_given_up_when_its_rank_ends_twice_in_a_row_at_one_step() -> None:
    policy = restarts()
    policy.after(KILLED, done=4, steps=4)
    assert policy.lost is None
    policy.after(replace(KILLED, kind="hung"), done=4, steps=1)
    assert policy.lost == handed_over(policy).lost == 1
    policy.after(replace(KILLED, rank=0), done=4, steps=1)
    assert policy.lost is None
    policy.reset()
    for done in (4, 5):
        policy.after(KILLED, done=done, steps=1)
    assert policy.lost is None
    policy.reset()
    policy.after(KILLED, done=5, steps=1)
    assert policy.lost is None  # what ended at this step before was another device
    policy = restarts()
    for _ in range(2):
        policy.after(BUG, done=4, steps=1)
    assert policy.lost is None  # an exception is no fault of a device
    policy.after(KILLED, done=4, steps=1)
    assert policy.lost is None
