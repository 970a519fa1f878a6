"""Importers: files of other tools become a job. One file a format; each key is carried, dropped with a reason,
or named as unknown, and what a tool does by default is written out where Stoker would do otherwise."""

from __future__ import annotations

from stoker.job.importers.convert import Imported, import_files
from stoker.job.importers.foreign_file import only_given
from stoker.job.importers.recognise import FORMATS

__all__ = ["FORMATS", "Imported", "import_files", "only_given"]
