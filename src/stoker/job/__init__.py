"""The job file: parsed strictly with the position of every value, checked, resolved and written."""

from __future__ import annotations

from stoker.job.load_job import LoadedJob, load_job
from stoker.job.resolution.resolve import Origin
from stoker.job.resolved import ResolvedJob
from stoker.job.schema import Job

__all__ = ["Job", "LoadedJob", "Origin", "ResolvedJob", "load_job"]
