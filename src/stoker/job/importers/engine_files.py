"""Keys by which a trainer's file names its engine: a DeepSpeed file or block, FSDP's options."""

from __future__ import annotations

from stoker.errors import UserError
from stoker.job.importers.deepspeed import read_deepspeed
from stoker.job.importers.foreign_file import find_beside, read_source
from stoker.job.importers.foreign_names import HYBRID, SHARDINGS, read_fsdp
from stoker.job.importers.ledger import Ledger
from stoker.job.yaml_document import JobDocument


def read_engine_keys(ledger: Ledger) -> None:
    """Reads ``deepspeed``, ``fsdp`` and ``fsdp_config``; a DeepSpeed file that is named is read with it."""
    _deepspeed(ledger)
    _fsdp(ledger)


def _deepspeed(ledger: Ledger) -> None:
    value = ledger.value("deepspeed")
    if isinstance(value, dict):
        marks = {path[1:]: mark for path, mark in ledger.document.marks.items() if path[0] == "deepspeed" and path[1:]}
        _read_into(ledger, JobDocument(ledger.document.file, value, marks))
        ledger.drop("deepspeed", "read as a DeepSpeed file")
    else:
        read_named(ledger, "deepspeed")


def read_named(ledger: Ledger, key: str) -> str | None:
    """Reads the DeepSpeed file that is named at a key, if any; returns its name."""
    name = ledger.text(key)
    if name is None:
        return None
    found = find_beside(name, ledger.document)
    if found is None:
        ledger.drop(key, "there is no such file here: give it as a second FILE", matters=True)
    else:
        _read_into(ledger, read_source(found))
        ledger.drop(key, f"read with this file: {found}")
    return name


def _read_into(ledger: Ledger, document: JobDocument) -> None:
    if not isinstance(document.data, dict):
        raise UserError(f"{document.file}: a DeepSpeed file holds keys and values")
    ledger.absorb(read_deepspeed(document))


def _fsdp(ledger: Ledger) -> None:
    value = ledger.value("fsdp")
    options = value.split() if isinstance(value, str) else ledger.words("fsdp") if isinstance(value, list) else []
    asked = bool(options) or value is True
    strategy = next((option for option in options if option.lower() in SHARDINGS), "")
    if strategy:
        note = HYBRID if "hybrid" in strategy.lower() else ""
        ledger.carry("fsdp", "parallel.shard", SHARDINGS[strategy.lower()], note)
        if "offload" in options:
            ledger.also("parallel.offload", "params")
    elif asked:
        ledger.carry("fsdp", "parallel.shard", "zero3")
    else:
        ledger.drop("fsdp", "off")
    asked = asked or ledger.value("fsdp_version") is not None
    ledger.drop("fsdp_version", "fully_shard (FSDP2) is what Stoker uses")
    if isinstance(ledger.value("fsdp_config"), str):
        ledger.drop("fsdp_config", "a file of its own: write its `reshard_after_forward` as `shard`", matters=True)
    else:
        read_fsdp(ledger, "fsdp_config", asked=asked, stated=bool(strategy))
