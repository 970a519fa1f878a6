"""LLaMA-Factory's register of data sets, ``dataset_info.json``, which maps a name to a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import Problem, UserError
from stoker.job.document.yaml_document import JobDocument
from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_data import ForeignSource
from stoker.job.importers.foreign_file import from_here, is_there, read_source
from stoker.job.keys.suggest_key import nearest

REGISTER = "dataset_info.json"
# Tags by which a sharegpt-shaped set is one of messages.
_MESSAGES = {"role_tag": "role", "content_tag": "content"}
_USUAL_TAGS = {
    "sharegpt": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
    "messages": {**_MESSAGES, "user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"},
}
JOINED = "an input follows its instruction after a blank line, in LLaMA-Factory on the next line"


def find_register(config: ConfigReader, given: str | None) -> JobDocument | None:
    """Finds the register: the given one, in ``dataset_dir`` (by default ``data``), or beside the file; None if
    missing.
    """
    if given is not None:
        path = Path(given)
        return read_source(path / REGISTER if path.is_dir() else path)
    here = Path(config.document.file).resolve().parent
    folder = str(config.value("dataset_dir") or "data")
    for base in (Path.cwd(), here, *here.parents):
        if is_there(base / folder / REGISTER):
            return read_source(from_here(base / folder / REGISTER))
    return read_source(from_here(here / REGISTER)) if is_there(here / REGISTER) else None


def source_of(name: str, register: JobDocument, config: ConfigReader, key: str) -> ForeignSource:
    """Returns the source registered under a name; records a problem if there is none."""
    entry = register.data.get(name)
    if not isinstance(entry, dict):
        near = nearest(name, map(str, register.data))
        message = f"`{name}` is not in {register.file}"
        if near:
            config.problem(key, message, f"did you mean {near}?")
        else:
            config.problem(key, message, "add it, or name the register: --data-info", missing_file=REGISTER)
        return ForeignSource(name)
    written = ConfigReader(register, config.tool, dropped=config.dropped).block((name,))
    found = ForeignSource(_path(name, entry, register))
    if entry.get("split") not in (None, "train"):
        found.split = str(entry["split"])
    for word, why in (
        ("subset", "Stoker reads a hub data set whole: name its files as `path` where subsets lie in folders"),
        ("folder", "write org/name's folder as the data's own path"),
        ("num_samples", "sampled there with repetition: write `split` or `weight`"),
        ("revision", "Stoker reads the main branch"),
    ):
        written.drop(word, why, matters=True)
    columns = entry.get("columns") or {}
    if not isinstance(columns, dict):
        raise UserError(register.problem((name, "columns"), "`columns` must be a block"))
    if entry.get("formatting", "alpaca") == "alpaca":
        _instruction(found, columns, ranking=bool(entry.get("ranking")))
    else:
        _conversation(found, columns, entry, ranking=bool(entry.get("ranking")))
    if columns.get("kto_tag"):
        found.format = "judged"
        found.columns["label"] = str(columns["kto_tag"])
    for modality in ("images", "videos", "audios"):
        written.drop(f"columns.{modality}", "Stoker trains on text", matters=True)
    tags = entry.get("tags") or {}
    usual = _USUAL_TAGS.get(found.format or "", {})
    for tag, value in tags.items() if isinstance(tags, dict) else ():
        if tag in usual and usual[tag] != value:
            written.leave((name, "tags", tag), f"Stoker reads `{usual[tag]}` there", matters=True)
    return found


def as_text(found: ForeignSource) -> ForeignSource:
    """Returns the source for continued pre-training, which reads the column of the prompts only."""
    if found.format == "instruction":
        column = found.columns.get("instruction", "instruction")
        found.format, found.columns = "text", {} if column == "text" else {"text": column}
        found.notes.pop("format", None)
    return found


def _path(name: str, entry: dict[str, Any], register: JobDocument) -> str:
    for hub in ("hf_hub_url", "ms_hub_url"):
        if entry.get(hub):
            return str(entry[hub])
    file = entry.get("file_name")
    if not file:
        what = "a loading script" if "script_url" in entry else "no file"
        message = f"`{name}` names {what}, and Stoker reads files and hub data sets"
        raise UserError(Problem(message, "write `file_name`", file=register.file, line=register.marks[(name,)].key[0]))
    return str(from_here(Path(register.file).parent / str(file)))


def _instruction(found: ForeignSource, columns: dict[str, Any], *, ranking: bool) -> None:
    ours = {"instruction": "prompt", "input": "query", "output": "response", "system": "system", "history": "history"}
    found.format = "instruction"
    if ranking:
        ours = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
        found.format = "preference"
    elif not columns or "query" in columns:
        found.notes["format"] = JOINED
    found.columns = {
        mine: str(columns[theirs]) for mine, theirs in ours.items() if columns.get(theirs) not in (None, mine)
    }


def _conversation(found: ForeignSource, columns: dict[str, Any], entry: dict[str, Any], *, ranking: bool) -> None:
    tags = entry.get("tags") or {}
    openai = entry.get("formatting") == "openai" or all(tags.get(tag) == word for tag, word in _MESSAGES.items())
    found.format = "messages" if openai else "sharegpt"
    mine = "messages" if openai else "conversations"
    ours = {mine: "messages", "system": "system", "tools": "tools"}
    if ranking:
        found.format = "preference"
        ours = {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"}
    given = {"messages": "conversations", **columns}
    found.columns = {mine: str(given[theirs]) for mine, theirs in ours.items() if given.get(theirs) not in (None, mine)}
