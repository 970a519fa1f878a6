"""Checks the data of later stages before the first one trains, so that a bad row costs no training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stoker.errors import Problem, UserError, placed_errors
from stoker.job.load_job import LoadedJob
from stoker.job.stage import Stage
from stoker.job.task_spec import is_language


def check_data_ahead(stages: Iterable[tuple[Stage, LoadedJob]], base: Path) -> None:
    """Tokenises and audits the data of stages; their runs find the tokens.

    Raises:
        UserError: with the problems of all stages.
        RunFailed: a process that checked data was killed or met a bug.
    """
    from stoker.cli.output.quiet_libraries import quiet_environment
    from stoker.cli.output.tokenise_report import quiet_report
    from stoker.launch.forkserver import start_server
    from stoker.launch.run_spec import RunSpec
    from stoker.launch.start_checks import check_node

    quiet_environment()
    problems: list[Problem] = []
    for stage, loaded in stages:
        start_server(language=is_language(loaded.job))
        spec = RunSpec(loaded, base, base / stage.output, read=loaded.document)
        try:
            with placed_errors(stage.placed_one):
                check_node(spec, 1, quiet_report)
        except UserError as error:
            if type(error) is not UserError:
                raise
            problems += error.problems
    if problems:
        raise UserError(*problems)
