"""Reads Axolotl's data sets: prompt types, columns, templates and the turns that are trained."""

from __future__ import annotations

import re
from typing import Any

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_data import LOADERS, SUBSET, ForeignSource, carry_share, data_files, local, take_first
from stoker.job.importers.tokens import keep_in_content
from stoker.job.keys.key_paths import KeyPath
from stoker.job.role_template import BadTemplate, pieces_of

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
    "Stoker tokenises in parallel by itself": "ds_type preprocess_shards",
}
LOST = {
    SUBSET: "name",
    "every row of a source is read": "shards shards_idx",
    "Stoker reads the main branch": "revision",
    "no code that comes with data is run": "trust_remote_code input_transform",
    "a turn's own say in what is trained is not read": "message_field_training message_field_training_detail",
    "reasoning is written as the tokenizer's template has it": "field_thinking template_thinking_key split_thinking",
    "system messages stay": "drop_system_message",
    "the columns tell how a row is read": "input_format",
    "of another task": "logprobs_field temperature step_separator max_completion_length train_on_last_step_only",
    "the source begins with its first row": "skip",
}


def read_data(config: ConfigReader, *, default_task: bool, added: str | KeyPath | None = None) -> None:
    """Reads the data sets, the task that follows from their types, the sequences and the held-out data.

    Args:
        default_task: whether the task is by default that of the data's types.
        added: the key at which the file adds tokens.
    """
    streamed = config.value("pretraining_dataset") is not None
    key = "pretraining_dataset" if streamed else "datasets"
    formats = _list(config, key, "data", added)
    if streamed:
        config.drop("datasets", "pretraining_dataset wins")
    pretrain = streamed or (bool(formats) and set(formats) == {"text"})
    if default_task:
        config.default("task", "pretrain" if pretrain else "sft", TASK)
    config.take("sequence_len", "train.seq_len", 512)
    config.take("sample_packing", "train.pack", False)
    _too_long(config, len(formats), pretrain=pretrain)
    if _list(config, "test_datasets", "evaluate.data", added):
        config.drop("val_set_size", "test_datasets says it")
    else:
        carry_share(config, "val_set_size")
    whole = config.flag("train_on_inputs")
    config.idle("documents are trained whole" if whole else "only answers are, by default", "train_on_inputs")
    config.idle("no data set asks for a template", "chat_template", "chat_template_jinja")


def _list(config: ConfigReader, key: str, home: str, added: str | KeyPath | None) -> list[str]:
    value = config.value(key)
    if isinstance(value, str):
        ForeignSource(local(value, config.document.file), "text").carry(config, key, f"{home}[0]")
        return ["text"]
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        config.problem(key, f"`{key}` must be a list of blocks", "write `- path: ...` for each")
        return []
    return [_source(config, (key, index), entry, f"{home}[{index}]", added) for index, entry in enumerate(value)]


def _source(config: ConfigReader, path: KeyPath, entry: dict[str, Any], home: str, added: str | KeyPath | None) -> str:
    """Carries one data set; returns its format."""
    source = config.block(path)
    name, files = str(entry.get("path") or ""), data_files(entry.get("data_files"))
    if not name:
        config.problem(path, "a data set without `path`", "write `path: org/name` or a file's")
        return "auto"
    if files and (name in LOADERS or entry.get("ds_type") or len(files) == 1):
        file = take_first(source, files)
        name = file if name in LOADERS or "/" in file else f"{name}/{file}"
    found = ForeignSource(local(name, config.document.file))
    kind = entry.get("type", "pretrain" if path[0] == "pretraining_dataset" else None)
    _kind(source, found, kind)
    _columns(source, entry, found)
    _template(config, source, entry, found, kind)
    _trained(config, source, entry, found)
    keep_in_content(found, added)
    if entry.get("split") not in (None, "train"):
        found.split = str(entry["split"])
    found.carry(config, source.path("path"), home)
    for key, target in (("type", "format"), ("split", "split")):
        value: Any = getattr(found, target)
        if isinstance(entry.get(key), dict):
            source.idle("read: its columns and texts", key)
        elif value is None:
            source.idle("Stoker's default", key)
        elif entry.get(key) is not None and not source.handled(key):
            source.carry(key, f"{home}.{target}", value, found.notes.get(target, ""))
    source.drop_listed(FREE, LOST)
    return found.format or "auto"


def _kind(source: ConfigReader, found: ForeignSource, kind: Any) -> None:
    if isinstance(kind, dict):
        found.format = "instruction"
        for column in ("instruction", "input", "output", "system"):
            if kind.get(f"field_{column}") not in (None, column):
                found.columns[column] = str(kind[f"field_{column}"])
        _texts(source.block(source.path("type")), kind, found)
        return
    word, _, column = str(kind).partition(":")
    word = word.split(".")[0]
    if word in TYPES:
        found.format, columns = TYPES[word]
        found.columns = {**columns, **({"text": column} if word == "completion" and column else {})}
    else:
        source.drop("type", "a prompt type that Stoker does not know: the columns tell the format", matters=True)


def _texts(type_block: ConfigReader, kind: dict[str, Any], found: ForeignSource) -> None:
    """A prompt type of the file's own, as a text for each role."""
    key = "no_input_format" if kind.get("no_input_format") else "format"
    if kind.get("system_prompt"):
        type_block.drop("system_prompt", "no system message is added", matters=True)
    if not kind.get(key):
        return
    texts = {"user": re.sub(r"\{instruction\}(.*\{input\})?", "{content}", str(kind[key]), flags=re.DOTALL)}
    if kind.get("system_format"):
        texts["system"] = str(kind["system_format"]).replace("{system}", "{content}")
    try:
        for role, text in texts.items():
            pieces_of(role, text)
    except BadTemplate as error:
        type_block.drop(key, f"a text that Stoker cannot use: {error.message}", matters=True)
        return
    found.template, found.keys["template"] = texts, type_block.path(key)
    if "{input}" in str(kind.get("format")):
        note = "an input follows its instruction after a blank line: compare with `stoker data`"
        if key == "format":
            found.notes["template"] = note
        else:
            type_block.drop("format", note, matters=True)


def _trained(config: ConfigReader, source: ConfigReader, entry: dict[str, Any], found: ForeignSource) -> None:
    """Reads the turns of a data set that are trained."""
    roles = entry.get("roles_to_train")
    names = [str(role) for role in roles] if isinstance(roles, list) else []
    if config.flag("train_on_inputs") and found.format != "text":
        found.train_on, found.keys["train_on"] = "everything", "train_on_inputs"
        source.drop("roles_to_train", "train_on_inputs wins")
    elif set(names) - set(ASSISTANT):
        found.train_on, found.keys["train_on"] = "everything", source.path("roles_to_train")
        found.notes["train_on"] = "all roles, here"
    else:
        source.drop("roles_to_train", "only answers are trained, by default", matters=roles == [])
    for key in ("train_on_eos", "train_on_eot"):
        why = "the stop token of each trained answer is trained"
        source.drop(key, why, matters=entry.get(key) not in ("turn", False))
    if isinstance(roles := entry.get("roles"), dict):
        given = {str(name) for alike in roles.values() for name in (alike if isinstance(alike, list) else [alike])}
        strange = sorted(given - set(USUAL_ROLES))
        why = f"Stoker knows no role {', '.join(strange)}" if strange else "roles are known by their usual names"
        source.drop("roles", why, matters=bool(strange))


def _columns(source: ConfigReader, entry: dict[str, Any], found: ForeignSource) -> None:
    mapping = entry.get("message_property_mappings") or {}
    given = mapping if isinstance(mapping, dict) else {}
    role, content = (given.get(part) or entry.get(f"message_field_{part}") for part in ("role", "content"))
    if found.format == "messages" and (role, content) == ("from", "value"):
        found.format, found.notes["format"] = "sharegpt", "roles and contents are in `from` and `value`"
    elif found.format == "messages" and (role not in (None, "role") or content not in (None, "content")):
        key = "message_property_mappings" if mapping else "message_field_role"
        source.leave(key, "Stoker reads role/content or from/value", matters=True)
    messages = {"messages": "messages", "sharegpt": "conversations"}.get(found.format or "", "")
    names = {"field_messages": messages, "field_tools": "tools", "field": "text", "text_column": "text"}
    for key, mine in names.items():
        value = entry.get(key)
        if mine and value not in (None, mine, messages):
            found.columns[mine] = str(value)
        source.drop(key, "`columns`" if mine in found.columns else "Stoker's name as well")
    source.idle("the format says it", "message_property_mappings", "message_field_role", "message_field_content")


def _template(
    config: ConfigReader, source: ConfigReader, entry: dict[str, Any], found: ForeignSource, kind: Any
) -> None:
    if found.format == "text":
        return
    if isinstance(kind, str) and kind.startswith("alpaca") and "chat" not in kind:
        found.set_template("alpaca")
        return
    if isinstance(found.template, dict):
        return
    if (conversation := entry.get("conversation")) is not None:
        found.set_template(str(conversation))
        if found.template != "auto" or not found.notes["template"]:
            found.keys["template"] = source.path("conversation")
            return
        source.drop("conversation", found.notes["template"], matters=True)
        found.template, found.notes["template"] = None, ""
    found.take_arguments(config)
    place = source if entry.get("chat_template") or entry.get("chat_template_jinja") else config
    name, jinja = place.text("chat_template"), place.text("chat_template_jinja")
    if jinja is not None and ("\n" in jinja or "{" in jinja):
        place.drop("chat_template_jinja", "write it to a .jinja file, and that as `template`", matters=True)
    elif jinja is not None:
        found.template = local(jinja, config.document.file)
        place.drop("chat_template_jinja", "`template` of each data set")
    elif name is not None:
        found.set_template(name)
    if name is not None:
        place.drop("chat_template", found.notes.get("template") or "`template` of each data set")


def _too_long(config: ConfigReader, count: int, *, pretrain: bool) -> None:
    word = config.text("excess_length_strategy")
    if pretrain:
        config.drop("excess_length_strategy", "long documents are split")
        return
    for index in range(count):
        target = f"data[{index}].too_long"
        if word is None:
            config.default(target, "drop", "rows longer than sequence_len")
        else:
            note = "Stoker refuses where more than `max_dropped` are" if word == "raise" else ""
            config.carry("excess_length_strategy", target, "cut" if word == "truncate" else "drop", note)
