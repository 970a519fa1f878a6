"""Every setting that a search would consider and Stoker can train with."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.hardware.machines.cluster import Cluster
from stoker.plan.candidates import root_settings, variants_of
from stoker.plan.search_space import EVERYTHING
from stoker.plan.setting import Setting, TrainingWork
from stoker.plan.software import STOKER
from stoker.plan.time.pass_times import PassTimes


def feasible_settings(work: TrainingWork, cluster: Cluster) -> Iterator[Setting]:
    passes = PassTimes()
    for root in root_settings(work, cluster, STOKER, EVERYTHING):
        yield from variants_of(root, passes, EVERYTHING)
