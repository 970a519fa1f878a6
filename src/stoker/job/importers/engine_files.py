"""Keys by which a trainer's file selects its engine: a DeepSpeed file or block, FSDP's options."""

from __future__ import annotations

from stoker.errors import UserError
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.deepspeed import read_deepspeed
from stoker.job.importers.foreign_file import find_beside, read_source
from stoker.job.importers.foreign_names import SHARDINGS, carry_sharding, read_fsdp
from stoker.job.yaml_document import JobDocument


def read_engine_keys(config: ConfigReader) -> None:
    """Reads ``deepspeed``, ``fsdp`` and ``fsdp_config``; a DeepSpeed file that is named is read with it."""
    _deepspeed(config)
    _fsdp(config)


def _deepspeed(config: ConfigReader) -> None:
    value = config.value("deepspeed")
    if isinstance(value, dict):
        marks = {path[1:]: mark for path, mark in config.document.marks.items() if path[0] == "deepspeed" and path[1:]}
        _read_into(config, JobDocument(config.document.file, value, marks))
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
        _read_into(config, read_source(found))
        config.drop(key, f"read with this file: {found}")
    return name


def _read_into(config: ConfigReader, document: JobDocument) -> None:
    if not isinstance(document.data, dict):
        raise UserError(f"{document.file}: a DeepSpeed file holds keys and values")
    config.absorb(read_deepspeed(document))


def _fsdp(config: ConfigReader) -> None:
    value = config.value("fsdp")
    options = value.split() if isinstance(value, str) else config.words("fsdp") if isinstance(value, list) else []
    asked = bool(options) or value is True
    strategy = next((option for option in options if option.lower() in SHARDINGS), "")
    if strategy:
        carry_sharding(config, "fsdp", strategy.lower())
        if "offload" in options:
            config.also("parallel.offload", "params")
    elif asked:
        config.carry("fsdp", "parallel.shard", "zero3")
    else:
        config.drop("fsdp", "off")
    asked = asked or config.value("fsdp_version") is not None
    config.drop("fsdp_version", "fully_shard (FSDP2) is what Stoker uses")
    if isinstance(config.value("fsdp_config"), str):
        config.drop("fsdp_config", "a file of its own: write its `reshard_after_forward` as `shard`", matters=True)
    else:
        read_fsdp(config, asked=asked, stated=bool(strategy))
