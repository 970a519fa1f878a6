"""A data source that is being read from a foreign file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.keys.key_paths import KeyPath

# Names of the `datasets` library's own loaders: the path is in `data_files`.
LOADERS = ("json", "jsonl", "csv", "parquet", "text", "arrow")
SUBSET = "Stoker reads a hub data set whole: name the subset's files as `path`"
# Names of templates elsewhere: the template here, and how it differs.
TEMPLATES = {
    **dict.fromkeys(("tokenizer_default", "auto", "default_tokenizer"), ("auto", "")),
    **dict.fromkeys(("empty", "none"), ("none", "")),
    "chatml": ("chatml", ""),
    "alpaca": ("plain", "### Instruction: / ### Response:, without the sentence that Alpaca puts before them"),
}


@dataclass
class ForeignSource:
    """The settings of one source in a foreign file; None if it omits one."""

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
    keys: dict[str, str | KeyPath] = field(default_factory=dict)  # the file's keys of these; else that of the path

    def carry(self, config: ConfigReader, key: str | KeyPath, home: str) -> None:
        """Carries the source into ``home``, as ``data[0]`` or ``evaluate.data[1]``; ``key`` is that of its path."""
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if item.name not in ("notes", "keys") and (value not in (None, {}) or item.name == "path"):
                by_role = item.name == "template" and isinstance(value, dict)
                parts = {f".{role}": text for role, text in value.items()} if by_role else {"": value}
                for end, part in parts.items():
                    note = self.notes.get(item.name, "")
                    config.carry(self.keys.get(item.name, key), f"{home}.{item.name}{end}", part, note)

    def set_template(self, name: str) -> None:
        """Sets Stoker's template for another tool's, with a note where it is not the same."""
        self.template, self.notes["template"] = TEMPLATES.get(name, ("auto", ""))
        if name.endswith((".jinja", ".jinja2", ".j2")):
            self.template = name
        elif name not in TEMPLATES:
            self.notes["template"] = f"the tokenizer's own takes the place of `{name}`: compare with `stoker data`"

    def take_arguments(self, config: ConfigReader) -> None:
        """Takes the template's variables, which Axolotl and TRL set for all sources together."""
        arguments = config.value("chat_template_kwargs")
        if isinstance(arguments, dict) and arguments:
            self.template_arguments, self.keys["template_arguments"] = arguments, "chat_template_kwargs"


def local(path: str, document_file: str) -> str:
    """Returns a path as the job writes it: relative to the current folder, or else to the file that names it."""
    beside = Path(document_file).parent / path
    if Path(path).exists() or Path(path).is_absolute() or not beside.exists():
        return path
    return str(beside)


def take_first(source: ConfigReader, files: list[str]) -> str:
    """Returns the first of a source's files: a source has one path here."""
    more = len(files) > 1
    why = "Stoker takes one path or glob a source: the first is written" if more else "`path`"
    source.drop("data_files", why, matters=more)
    return files[0]


def carry_share(config: ConfigReader, key: str) -> None:
    """Carries the fraction of the rows that is held out; a number of rows is dropped."""
    share = config.number(key)
    if share and share >= 1:
        why = f"{share:g} rows; Stoker holds out a share: write `fraction` under `evaluate:`"
        config.drop(key, why, matters=True)
        return
    config.take(key, "evaluate.fraction", 0.0)
    if share:
        config.also("evaluate.rows", "all")


def data_files(value: Any) -> list[str]:
    """Returns the paths of a ``data_files`` key: one, a list, or the training split's of a mapping."""
    if isinstance(value, dict):
        value = value.get("train", next(iter(value.values()), None))
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)] if value not in (None, "") else []
