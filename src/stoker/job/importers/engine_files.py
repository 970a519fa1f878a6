"""Keys by which a trainer's file selects its engine: a DeepSpeed file or block, FSDP's options."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.deepspeed import read_deepspeed
from stoker.job.importers.foreign_file import find_beside, read_source
from stoker.job.importers.fsdp import read_fsdp
from stoker.job.yaml_document import JobDocument


def read_engine_keys(config: ConfigReader) -> None:
    """Reads ``deepspeed``, ``fsdp`` and ``fsdp_config``; a DeepSpeed file that is named is read with it."""
    _deepspeed(config)
    read_fsdp(config)


def _deepspeed(config: ConfigReader) -> None:
    value = config.value("deepspeed")
    if isinstance(value, dict):
        marks = {path[1:]: mark for path, mark in config.document.marks.items() if path[0] == "deepspeed" and path[1:]}
        config.absorb(read_deepspeed(JobDocument(config.document.file, value, marks)))
        config.drop("deepspeed", "read as a DeepSpeed file")
    else:
        read_named(config, "deepspeed")


def read_named(config: ConfigReader, key: str) -> str | None:
    """Reads the DeepSpeed file that is named at a key, if any; returns its name."""
    name = config.text(key)
    if name is None:
        return None
    found = find_beside(name, config.document)
    if found is None:
        config.drop(key, "there is no such file here: give it as a second FILE", matters=True)
    else:
        config.absorb(read_deepspeed(read_source(found)))
        config.drop(key, f"read with this file: {found}")
    return name
