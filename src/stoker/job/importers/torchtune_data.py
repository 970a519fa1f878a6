"""Reads torchtune's data sets, which are named by their builders."""

from __future__ import annotations

from typing import Any

from stoker.job.importers.config_reader import ConfigReader
from stoker.job.importers.foreign_data import LOADERS, SUBSET, ForeignSource, data_files, local, take_first
from stoker.job.keys.key_paths import KeyPath
from stoker.job.role_template import TURNS

COMPONENT = "_component_"
# Builders: Stoker's format, the hub data set they read by default, their columns, whether prompts are trained too.
BUILDERS: dict[str, tuple[str | None, str, dict[str, str], bool]] = {
    "alpaca_dataset": ("instruction", "tatsu-lab/alpaca", {}, True),
    "alpaca_cleaned_dataset": ("instruction", "yahma/alpaca-cleaned", {}, True),
    "instruct_dataset": ("instruction", "", {"instruction": "input"}, False),
    "chat_dataset": ("messages", "", {}, False),
    "text_completion_dataset": ("text", "", {}, False),
    "wikitext_dataset": ("text", "EleutherAI/wikitext_document_level", {"text": "page"}, False),
    "cnn_dailymail_articles_dataset": ("text", "ccdv/cnn_dailymail", {"text": "article"}, False),
    "slimorca_dataset": ("sharegpt", "Open-Orca/SlimOrca-Dedup", {}, False),
    "grammar_dataset": ("instruction", "liweili/c4_200m", {"instruction": "input"}, False),
    "samsum_dataset": ("instruction", "Samsung/samsum", {"instruction": "dialogue", "output": "summary"}, False),
    "preference_dataset": ("preference", "", {}, False),
    "stack_exchange_paired_dataset": ("preference", "lvwerra/stack-exchange-paired", {}, False),
    "hh_rlhf_helpful_dataset": ("preference", "RLHFlow/HH-RLHF-Helpful-standard", {}, False),
}
FREE = {
    "a document ends with the stop token, always": "add_eos",
    "packed documents are whole, or split at seq_len": "split_across_pack",
    "as in training": "packed",
}
LOST = {
    "no system message is added": "new_system_prompt",
    "rows are not filtered": "filter_fn",
    "write `seq_len` under `train:`": "max_seq_len",
    SUBSET: "name",
}
MASKS = {"train_on_all": "everything", "train_on_assistant": "all", "train_on_last": "last"}


def read_sources(config: ConfigReader) -> list[str]:
    """Reads ``dataset`` and ``dataset_val``; returns the formats of the training data."""
    formats = _list(config, "dataset", "data")
    if not _list(config, "dataset_val", "evaluate.data"):
        config.default("evaluate.fraction", 0.0)
    return formats


def _list(config: ConfigReader, key: str, home: str) -> list[str]:
    value = config.value(key)
    path: KeyPath = (key,)
    if isinstance(value, dict) and isinstance(value.get("datasets"), list):  # ConcatDataset
        value, path = value["datasets"], (key, "datasets")
        config.leave((key, COMPONENT), "sources follow each other")
    entries: list[tuple[KeyPath, Any]] = [(path, value)] * (value is not None)
    if isinstance(value, list):
        entries = [((*path, index), item) for index, item in enumerate(value)]
    formats = []
    for index, (place, entry) in enumerate(entries):
        if not isinstance(entry, dict) or COMPONENT not in entry:
            config.problem(place, "a data set without `_component_`", "write `_component_: torchtune.datasets....`")
        else:
            formats.append(_source(config, config.block(place), entry, f"{home}[{index}]"))
    return formats


def _source(config: ConfigReader, block: ConfigReader, entry: dict[str, Any], home: str) -> str:
    name = str(entry[COMPONENT]).rsplit(".", maxsplit=1)[-1]
    format, default, columns, on_input = BUILDERS.get(name, (None, "", {}, False))
    source, files = str(entry.get("source") or default), data_files(entry.get("data_files"))
    if name not in BUILDERS:
        block.leave(COMPONENT, "a builder that Stoker does not know: the columns tell the format", matters=True)
    if source in LOADERS and files:
        source = take_first(block, files)
    if not source:
        hint = "write `source: org/name`, or json and `data_files`"
        config.problem(block.within, f"`{name}` names no `source`", hint)
        return format or "auto"
    found = ForeignSource(local(source, config.document.file), format, dict(columns))
    _details(block, entry, found, name)
    _trained(block, entry, found, on_input=on_input)
    _prompt_template(config, found)
    found.carry(config, block.path("source" if "source" in entry else COMPONENT), home)
    if not block.handled(COMPONENT):
        block.carry(COMPONENT, f"{home}.format", found.format)
    if entry.get("split") not in (None, "train"):
        block.carry("split", f"{home}.split", str(entry["split"]))
    elif "split" in entry:
        block.leave("split", "train is the default")
    return found.format or "auto"


def _trained(block: ConfigReader, entry: dict[str, Any], found: ForeignSource, *, on_input: bool) -> None:
    """Reads the turns of a data set that are trained."""
    strategy = entry.get("masking_strategy")
    if strategy in MASKS:
        found.train_on, found.keys["train_on"] = MASKS[str(strategy)], block.path("masking_strategy")
        block.idle("masking_strategy says it", "train_on_input")
        return
    trained = block.flag("train_on_input")
    if trained:
        found.train_on, found.keys["train_on"] = "everything", block.path("train_on_input")
    elif trained is None and on_input:
        found.train_on, found.notes["train_on"] = "everything", "torchtune's default for this builder"
    else:
        block.drop("train_on_input", "only answers are trained, by default")


def _prompt_template(config: ConfigReader, found: ForeignSource) -> None:
    """The tokenizer's template of texts before and behind each role's turns."""
    key = "tokenizer.prompt_template"
    value = config.value(key)
    if isinstance(value, str):
        config.drop(key, "a template in code: write `template`, a text for each role", matters=True)
    if not isinstance(value, dict) or found.format == "text":
        return
    texts = {}
    for role, around in value.items():
        if role not in TURNS or not isinstance(around, list) or len(around) != 2:
            config.drop(key, f"`{role}`: not texts before and behind a turn that Stoker knows", matters=True)
            return
        before, after = (str(part or "").replace("{", "{{").replace("}", "}}") for part in around)
        texts[str(role)] = f"{before}{{content}}{after}"
    found.template, found.keys["template"] = {"system": "{content}", "user": "{content}"} | texts, key


def _details(block: ConfigReader, entry: dict[str, Any], found: ForeignSource, name: str) -> None:
    style = str(entry.get("conversation_style") or "")
    if style:
        found.format = "sharegpt" if style == "sharegpt" else "messages"
        block.drop("conversation_style", "`format`")
    column, usual = entry.get("conversation_column"), "conversations" if found.format == "sharegpt" else "messages"
    if column not in (None, usual):
        found.columns[usual] = str(column)
    block.drop("conversation_column", "`columns`" if column != usual else "Stoker's name as well")
    if entry.get("column") not in (None, "text"):
        found.columns = {"text": str(entry["column"])}
    block.drop("column", "`columns`")
    mapping = entry.get("column_map")
    if isinstance(mapping, dict):
        # instruct_dataset calls the question `input`; alpaca's builders have Stoker's own names.
        names = {"input": "instruction"} if name == "instruct_dataset" else {}
        found.columns |= {names.get(str(ours), str(ours)): str(theirs) for ours, theirs in mapping.items()}
        found.columns = {ours: theirs for ours, theirs in found.columns.items() if ours != theirs}
        block.drop("column_map", "`columns`")
    if name.startswith("alpaca"):
        found.set_template("alpaca")
    packed = block.flag("packed")
    if block.within[0] == "dataset" and packed is not None:
        block.carry("packed", "train.pack", packed)
    elif block.within[0] == "dataset":
        block.default("train.pack", False)
    block.drop_listed(FREE, LOST)
