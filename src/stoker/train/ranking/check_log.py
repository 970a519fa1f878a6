"""The checks of a ranking job's data and servers before its processes start."""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.data.ranking.ranking_block import RankingBlock
from stoker.job.load_job import LoadedJob
from stoker.job.task_spec import block_of_task
from stoker.train.ranking.job_log import open_log_of
from stoker.train.ranking.ranking_tables import servers_of
from stoker.train.ranking.resumed_features import features_to_resume


def check_log(loaded: LoadedJob, base: Path) -> None:
    """Reads the job's log once, and prints a line for each row server that does not answer.

    Raises:
        UserError: the log cannot be read or must not be trained on, or the servers' secret cannot be read.
    """
    open_log_of(loaded, base, training=True, features=features_to_resume(loaded.job, base))
    with loaded.errors_at_their_keys():
        servers = servers_of(block_of_task(loaded.job, RankingBlock), base)
    if servers is not None:
        for line in servers.unreachable():
            print(line, file=sys.stderr)
