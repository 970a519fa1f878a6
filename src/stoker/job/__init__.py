"""The job: one YAML file, read strictly, with the place of every value; checked, resolved, written anew."""

from __future__ import annotations

from stoker.job.load_job import LoadedJob, load_job
from stoker.job.resolve import Origin
from stoker.job.resolved import ResolvedJob
from stoker.job.schema import Job

__all__ = ["Job", "LoadedJob", "Origin", "ResolvedJob", "load_job"]
