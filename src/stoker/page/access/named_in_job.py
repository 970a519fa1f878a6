"""What the tasks of a job name in their blocks, with the places of the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stoker.errors import Problem
from stoker.job.document.yaml_document import JobDocument
from stoker.job.load_job import STAGES, JobError, ReadJob, check_document
from stoker.job.stages import split_stages
from stoker.job.task_spec import Named, task_of


def named_in_job(document: JobDocument) -> Iterator[tuple[Named, Problem]]:
    """Yields what a job, or each of its stages, names, with the place of the key as a problem without a message.

    Names of earlier stages are left out, and values of invalid keys.

    Raises:
        UserError: the stages are invalid.
    """
    if STAGES not in document.data:
        read = sound_job(lambda: check_document(document))
        for named in task_of(read.job).names(read.job):
            yield named, read.problem(named.key, "")
        return
    for stage in split_stages(document).stages:
        read = sound_job(stage.load)
        for named in task_of(read.job).names(read.job):
            if named.key not in stage.needs:
                yield named, stage.placed([read.problem(named.key, "")])[0]


def sound_job(load: Callable[[], ReadJob]) -> ReadJob:
    """Returns a job that is loaded; without its invalid keys if it has some."""
    try:
        return load()
    except JobError as error:
        return error.sound
