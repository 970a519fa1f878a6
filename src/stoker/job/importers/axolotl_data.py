"""Axolotl's data sets: the prompt type and the names of the columns, and what they are here."""

from __future__ import annotations

import re
from typing import Any

from stoker.job.importers.foreign_data import LOADERS, ForeignSource, carry_source, data_files, local, template_of
from stoker.job.importers.ledger import Ledger
from stoker.job.importers.tokens import keep_in_content
from stoker.job.key_paths import KeyPath
from stoker.job.template import BadTemplate, pieces_of

TASK = "by the types of its data sets"
# Prompt types by their first word: Stoker's format and its columns under other names.
TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "alpaca": ("instruction", {}),
    "alpaca_chat": ("instruction", {}),
    "alpaca_w_system": ("instruction", {}),
    "jeopardy": ("instruction", {"instruction": "category", "input": "question", "output": "answer"}),
    "gpteacher": ("instruction", {"output": "response"}),
    "reflection": ("instruction", {}),
    "explainchoice": ("instruction", {}),
    "oasst": ("prompt", {"prompt": "INSTRUCTION", "completion": "RESPONSE"}),
    "context_qa": ("instruction", {"instruction": "question", "input": "context", "output": "answer"}),
    "sharegpt": ("sharegpt", {}),
    "chat_template": ("messages", {}),
    "completion": ("text", {}),
    "pretrain": ("text", {}),
}
ASSISTANT = ("assistant", "gpt", "model")
USUAL_ROLES = (*ASSISTANT, "user", "human", "system", "developer", "tool", "function", "observation", "function_call")
FREE = {
    "Stoker tokenises in parallel by itself": "ds_type shards shards_idx preprocess_shards",
}
LOST = {
    "Stoker reads a hub data set whole: name the subset's files as `path`": "name",
    "Stoker reads the main branch": "revision",
    "no code that comes with data is run": "trust_remote_code input_transform",
    "a turn's own say in what is trained is not read": "message_field_training message_field_training_detail",
    "reasoning is written as the tokenizer's template has it": "field_thinking template_thinking_key split_thinking",
    "system messages stay": "drop_system_message",
    "the columns tell how a row is read": "input_format",
    "of another task": "logprobs_field temperature step_separator max_completion_length train_on_last_step_only",
    "the source begins with its first row": "skip",
}


def read_data(ledger: Ledger, *, tell_task: bool, added: str | KeyPath | None = None) -> None:
    """Reads the data sets, the task that their types make, the sequences and what is held out.

    Args:
        added: the key at which the file adds tokens.
    """
    streamed = ledger.value("pretraining_dataset")
    key = "pretraining_dataset" if streamed is not None else "datasets"
    formats = _list(ledger, key, "data", added)
    if streamed is not None and ledger.value("datasets") is not None:
        ledger.drop("datasets", "pretraining_dataset wins")
    pretrain = streamed is not None or (bool(formats) and set(formats) == {"text"})
    if tell_task:
        ledger.default("task", "pretrain" if pretrain else "sft", TASK)
    if (length := ledger.whole("sequence_len")) is not None:
        ledger.carry("sequence_len", "train.seq_len", length)
    else:
        ledger.default("train.seq_len", 512)
    if (packing := ledger.flag("sample_packing")) is not None:
        ledger.carry("sample_packing", "train.pack", packing)
    else:
        ledger.default("train.pack", False)
    _too_long(ledger, len(formats), pretrain=pretrain)
    _held_out(ledger, added)
    if ledger.value("train_on_inputs") is not None and not ledger.handled("train_on_inputs"):
        trained = "documents are trained whole" if ledger.flag("train_on_inputs") else "only answers are, by default"
        ledger.drop("train_on_inputs", trained)
    for word in ("chat_template", "chat_template_jinja"):
        if ledger.value(word) is not None and not ledger.handled(word):
            ledger.drop(word, "no data set asks for a template", matters=False)


def _list(ledger: Ledger, key: str, home: str, added: str | KeyPath | None) -> list[str]:
    value = ledger.value(key)
    if isinstance(value, str):
        found = ForeignSource(local(value, ledger.document.file), "text")
        carry_source(ledger, key, found, f"{home}[0]")
        return ["text"]
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        ledger.problem(key, f"`{key}` must be a list of blocks", "write `- path: ...` for each")
        return []
    return [_source(ledger, (key, index), entry, f"{home}[{index}]", added) for index, entry in enumerate(value)]


def _source(ledger: Ledger, path: KeyPath, entry: dict[str, Any], home: str, added: str | KeyPath | None) -> str:
    """Carries one data set; returns its format."""
    name, files = str(entry.get("path") or ""), data_files(entry.get("data_files"))
    if not name:
        ledger.problem(path, "a data set without `path`", "write `path: org/name` or a file's")
        return "auto"
    if files and (name in LOADERS or entry.get("ds_type") or len(files) == 1):
        name = files[0] if name in LOADERS or "/" in files[0] else f"{name}/{files[0]}"
        more = len(files) > 1
        ledger.drop((*path, "data_files"), "Stoker takes one path or glob a source" if more else "`path`", matters=more)
    found = ForeignSource(local(name, ledger.document.file))
    kind = entry.get("type", "pretrain" if path[0] == "pretraining_dataset" else None)
    _kind(ledger, path, found, kind)
    _columns(ledger, path, entry, found)
    _template(ledger, path, entry, found, kind)
    _trained(ledger, path, entry, found)
    keep_in_content(found, added)
    split = entry.get("split")
    if split not in (None, "train"):
        found.split = str(split)
    carry_source(ledger, (*path, "path"), found, home)
    for key, target in (("type", "format"), ("split", "split")):
        value: Any = getattr(found, target)
        if entry.get(key) is not None and not ledger.handled((*path, key)):
            if isinstance(entry[key], dict):
                ledger.drop((*path, key), "read: its columns and texts")
            elif value is not None:
                ledger.carry((*path, key), f"{home}.{target}", value, found.notes.get(target, ""))
            else:
                ledger.drop((*path, key), "Stoker's default")
    _rest(ledger, path, entry)
    return found.format or "auto"


def _kind(ledger: Ledger, path: KeyPath, found: ForeignSource, kind: Any) -> None:
    if isinstance(kind, dict):
        found.format = "instruction"
        for theirs, mine in (
            ("field_instruction", "instruction"), ("field_input", "input"), ("field_output", "output"),
            ("field_system", "system"),
        ):  # fmt: skip
            if kind.get(theirs) not in (None, mine):
                found.columns[mine] = str(kind[theirs])
        _texts(ledger, (*path, "type"), kind, found)
        return
    word = str(kind).split(":", maxsplit=1)[0].split(".")[0] if kind is not None else ""
    if word in TYPES:
        found.format, columns = TYPES[word]
        found.columns = dict(columns)
        if word == "completion" and ":" in str(kind):
            found.columns["text"] = str(kind).split(":", maxsplit=1)[1]
    elif kind is not None:
        ledger.drop(
            (*path, "type"), "a prompt type that Stoker does not know: the columns tell the format", matters=True
        )


def _texts(ledger: Ledger, path: KeyPath, kind: dict[str, Any], found: ForeignSource) -> None:
    """A prompt type of the file's own, as a text for each role."""
    key = "no_input_format" if kind.get("no_input_format") else "format"
    if kind.get("system_prompt"):
        ledger.drop((*path, "system_prompt"), "no system message is added", matters=True)
    if not kind.get(key):
        return
    texts = {"user": re.sub(r"\{instruction\}(.*\{input\})?", "{content}", str(kind[key]), flags=re.DOTALL)}
    if kind.get("system_format"):
        texts["system"] = str(kind["system_format"]).replace("{system}", "{content}")
    try:
        for role, text in texts.items():
            pieces_of(role, text)
    except BadTemplate as error:
        ledger.drop((*path, key), f"a text that Stoker cannot take over: {error.message}", matters=True)
        return
    found.template, found.keys["template"] = texts, (*path, key)
    if "{input}" in str(kind.get("format")):
        note = "an input follows its instruction after a blank line: compare with `stoker data`"
        if key == "format":
            found.notes["template"] = note
        else:
            ledger.drop((*path, "format"), note, matters=True)


def _trained(ledger: Ledger, path: KeyPath, entry: dict[str, Any], found: ForeignSource) -> None:
    """Which turns of a data set are trained."""
    roles = entry.get("roles_to_train")
    names = [str(role) for role in roles] if isinstance(roles, list) else []
    if ledger.flag("train_on_inputs") and found.format != "text":
        found.train_on, found.keys["train_on"] = "everything", "train_on_inputs"
    elif set(names) - set(ASSISTANT):
        found.train_on, found.keys["train_on"] = "everything", (*path, "roles_to_train")
        found.notes["train_on"] = "all roles, here"
    elif roles is not None:
        ledger.drop((*path, "roles_to_train"), "only answers are trained, by default", matters=roles == [])
    for key in ("train_on_eos", "train_on_eot"):
        if entry.get(key) is not None:
            why = "the stop token of each trained answer is trained"
            ledger.drop((*path, key), why, matters=entry[key] not in ("turn", False))
    if isinstance(roles := entry.get("roles"), dict):
        given = {str(name) for alike in roles.values() for name in (alike if isinstance(alike, list) else [alike])}
        strange = sorted(given - set(USUAL_ROLES))
        why = f"Stoker knows no role {', '.join(strange)}" if strange else "roles are known by their usual names"
        ledger.drop((*path, "roles"), why, matters=bool(strange))


def _columns(ledger: Ledger, path: KeyPath, entry: dict[str, Any], found: ForeignSource) -> None:
    mapping = entry.get("message_property_mappings") or {}
    role = (mapping.get("role") if isinstance(mapping, dict) else None) or entry.get("message_field_role")
    content = (mapping.get("content") if isinstance(mapping, dict) else None) or entry.get("message_field_content")
    if found.format == "messages" and (role, content) == ("from", "value"):
        found.format, found.notes["format"] = "sharegpt", "roles and contents are in `from` and `value`"
    elif found.format == "messages" and (role not in (None, "role") or content not in (None, "content")):
        key = "message_property_mappings" if mapping else "message_field_role"
        ledger.drop((*path, key), "Stoker reads role/content or from/value", matters=True)
    list_column = {"messages": "messages", "sharegpt": "conversations"}.get(found.format or "", "")
    usual = "messages" if found.format == "messages" else list_column
    for key, mine in (
        ("field_messages", list_column), ("field_tools", "tools"), ("field", "text"), ("text_column", "text"),
    ):  # fmt: skip
        value = entry.get(key)
        if value is None:
            continue
        if mine and value not in (mine, usual):
            found.columns[mine] = str(value)
        ledger.drop((*path, key), "`columns`" if mine in found.columns else "Stoker's name as well")
    for key in ("message_property_mappings", "message_field_role", "message_field_content"):
        if entry.get(key) is not None and not ledger.handled((*path, key)):
            ledger.drop((*path, key), "the format says it")


def _template(ledger: Ledger, path: KeyPath, entry: dict[str, Any], found: ForeignSource, kind: Any) -> None:
    if found.format == "text":
        return
    if isinstance(kind, str) and kind.startswith("alpaca") and "chat" not in kind:
        found.template, found.notes["template"] = template_of("alpaca")
        return
    if isinstance(found.template, dict):
        return
    if (conversation := entry.get("conversation")) is not None:
        template, note = template_of(str(conversation))
        if template == "auto" and note:
            ledger.drop((*path, "conversation"), note, matters=True)
        else:
            found.template, found.notes["template"] = template, note
            found.keys["template"] = (*path, "conversation")
            return
    place: KeyPath = path if entry.get("chat_template") or entry.get("chat_template_jinja") else ()
    arguments = ledger.value("chat_template_kwargs")
    if isinstance(arguments, dict) and arguments:
        found.template_arguments, found.keys["template_arguments"] = arguments, "chat_template_kwargs"
    name = ledger.text((*place, "chat_template"))
    jinja = ledger.text((*place, "chat_template_jinja"))
    if jinja is not None:
        if "\n" in jinja or "{" in jinja:
            why = "write it to a .jinja file, and that as `template`"
            ledger.drop((*place, "chat_template_jinja"), why, matters=True)
        else:
            found.template = local(jinja, ledger.document.file)
            ledger.drop((*place, "chat_template_jinja"), "`template` of each data set")
    elif name is not None:
        found.template, found.notes["template"] = template_of(name)
    if name is not None:
        ledger.drop((*place, "chat_template"), found.notes.get("template") or "`template` of each data set")


def _rest(ledger: Ledger, path: KeyPath, entry: dict[str, Any]) -> None:
    for table, matters in ((FREE, False), (LOST, True)):
        for why, names in table.items():
            for name in names.split():
                if name in entry and not ledger.handled((*path, name)):
                    set_here = entry[name] not in (None, False, "", [], {})
                    ledger.drop((*path, name), why if set_here else "not set", matters=matters and set_here)


def _too_long(ledger: Ledger, count: int, *, pretrain: bool) -> None:
    word = ledger.text("excess_length_strategy")
    does = {"drop": "drop", "truncate": "cut", "raise": "drop"}.get(word or "drop", "drop")
    if pretrain:
        if word is not None:
            ledger.drop("excess_length_strategy", "long documents are split")
        return
    for index in range(count):
        if word is None:
            ledger.default(f"data[{index}].too_long", "drop", "rows longer than sequence_len")
        else:
            note = "Stoker refuses where more than `max_dropped` are" if word == "raise" else ""
            ledger.carry("excess_length_strategy", f"data[{index}].too_long", does, note)


def _held_out(ledger: Ledger, added: str | KeyPath | None) -> None:
    share = ledger.number("val_set_size")
    formats = _list(ledger, "test_datasets", "evaluate.data", added)
    if formats:
        if share is not None:
            ledger.drop("val_set_size", "test_datasets says it")
    elif share and share < 1:
        ledger.carry("val_set_size", "evaluate.fraction", float(share))
        ledger.also("evaluate.rows", "all")
    elif share:
        why = f"{share:g} rows; Stoker holds out a share: write `fraction` under `evaluate:`"
        ledger.drop("val_set_size", why, matters=True)
    elif share is not None:
        ledger.carry("val_set_size", "evaluate.fraction", 0.0)
    else:
        ledger.default("evaluate.fraction", 0.0)
