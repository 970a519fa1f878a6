"""A source of data on its way from a foreign file into the job."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stoker.job.importers.ledger import Ledger
from stoker.job.key_paths import KeyPath

# Names of the `datasets` library's own loaders: the path is in `data_files`.
LOADERS = ("json", "jsonl", "csv", "parquet", "text", "arrow")
# What other tools call the tokenizer's own template.
OF_TOKENIZER = ("tokenizer_default", "auto", "default_tokenizer")


@dataclass
class ForeignSource:
    """What a foreign file says of one source; None where it says nothing."""

    path: str = ""
    format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    weight: float | None = None
    split: str | None = None
    template: str | dict[str, str] | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    train_on: str | None = None
    special_tokens: str | None = None
    too_long: str | None = None
    notes: dict[str, str] = field(default_factory=dict)  # by the names above
    keys: dict[str, str | KeyPath] = field(default_factory=dict)  # the source's keys of them; else that of the path


def carry_source(ledger: Ledger, key: str | KeyPath, found: ForeignSource, home: str) -> None:
    """Carries a source into ``home``, as ``data[0]`` or ``evaluate.data[1]``."""
    ledger.carry(key, f"{home}.path", found.path, found.notes.get("path", ""))
    for item in fields(found):
        value: Any = getattr(found, item.name)
        if item.name not in ("path", "notes", "keys") and value not in (None, {}):
            other = found.keys.get(item.name, key)
            texts = (
                {f".{role}": text for role, text in value.items()}
                if item.name == "template" and (isinstance(value, dict))
                else {"": value}
            )
            for end, part in texts.items():
                ledger.also(f"{home}.{item.name}{end}", part, found.notes.get(item.name, ""), key=other)


def from_here(path: Path) -> str:
    """A path as people write it: relative where it lies below the folder we are in."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


def local(path: str, document_file: str) -> str:
    """A path as the job has it: relative ones begin where we are, or else beside the file that names them."""
    beside = Path(document_file).parent / path
    if Path(path).exists() or Path(path).is_absolute() or not beside.exists():
        return path
    return str(beside)


def data_files(value: Any) -> list[str]:
    """The paths of a ``data_files`` key: one, a list, or lists by split, of which the training's are taken."""
    if isinstance(value, dict):
        value = value.get("train", next(iter(value.values()), None))
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)] if value not in (None, "") else []


def template_of(name: str) -> tuple[str, str]:
    """Stoker's template for another tool's, and a note where it is not the same."""
    if name in OF_TOKENIZER:
        return "auto", ""
    if name == "chatml":
        return "chatml", ""
    if name == "alpaca":
        return "plain", "### Instruction: / ### Response:, without the sentence that Alpaca puts before them"
    if name in ("empty", "none"):
        return "none", ""
    if name.endswith((".jinja", ".jinja2", ".j2")):
        return name, ""
    return "auto", f"the tokenizer's own takes the place of `{name}`: compare with `stoker data`"
