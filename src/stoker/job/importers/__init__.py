"""Importers convert other tools' files to a job. One file a format; each key is carried, dropped with a reason,
or reported as unknown, and a tool's default is written out if Stoker's differs.
"""

from __future__ import annotations

from stoker.job.importers.convert import Imported, import_files
from stoker.job.importers.foreign_file import only_given
from stoker.job.importers.recognise import FORMATS, is_own_job

__all__ = ["FORMATS", "Imported", "import_files", "is_own_job", "only_given"]
