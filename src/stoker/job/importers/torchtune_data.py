"""torchtune's data sets: their builders, and what they read."""

from __future__ import annotations

from typing import Any

from stoker.job.importers.foreign_data import LOADERS, ForeignSource, carry_source, data_files, local, template_of
from stoker.job.importers.ledger import Ledger
from stoker.job.key_paths import KeyPath
from stoker.job.template import TURNS

COMPONENT = "_component_"
# Builders: Stoker's format, the hub data set they read by default, their columns, whether prompts are trained too.
BUILDERS: dict[str, tuple[str, str, dict[str, str], bool]] = {
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
MASKS = {"train_on_all": "everything", "train_on_assistant": "all", "train_on_last": "last"}


def read_sources(ledger: Ledger) -> list[str]:
    """Reads ``dataset`` and ``dataset_val``; returns the formats of what is trained on."""
    formats = _list(ledger, "dataset", "data")
    if _list(ledger, "dataset_val", "evaluate.data"):
        return formats
    ledger.default("evaluate.fraction", 0.0)
    return formats


def _list(ledger: Ledger, key: str, home: str) -> list[str]:
    value = ledger.value(key)
    prefix: KeyPath = (key,)
    if isinstance(value, dict) and isinstance(value.get("datasets"), list):  # ConcatDataset
        value, prefix = value["datasets"], (key, "datasets")
        ledger.drop((key, COMPONENT), "sources follow each other")
    entries: list[tuple[KeyPath, Any]] = (
        [((*prefix, i), item) for i, item in enumerate(value)]
        if isinstance(value, list)
        else [((key,), value)] * (value is not None)
    )
    formats = []
    for index, (path, entry) in enumerate(entries):
        if not isinstance(entry, dict) or COMPONENT not in entry:
            ledger.problem(path, "a data set without `_component_`", "write `_component_: torchtune.datasets....`")
            continue
        formats.append(_source(ledger, path, entry, f"{home}[{index}]"))
    return formats


def _source(ledger: Ledger, path: KeyPath, entry: dict[str, Any], home: str) -> str:
    name = str(entry[COMPONENT]).rsplit(".", maxsplit=1)[-1]
    format, default, columns, on_input = BUILDERS.get(name, ("auto", "", {}, False))
    source, files = str(entry.get("source") or default), data_files(entry.get("data_files"))
    if name not in BUILDERS:
        ledger.drop(
            (*path, COMPONENT), "a builder that Stoker does not know: the columns tell the format", matters=True
        )
    if source in LOADERS and files:
        source = files[0]
        more = len(files) > 1
        ledger.drop((*path, "data_files"), "Stoker takes one path or glob a source" if more else "`path`", matters=more)
    if not source:
        ledger.problem(path, f"`{name}` names no `source`", "write `source: org/name`, or json and `data_files`")
        return format
    found = ForeignSource(local(source, ledger.document.file), format if format != "auto" else None, dict(columns))
    _details(ledger, path, entry, found, name)
    _trained(ledger, path, entry, found, on_input=on_input)
    _prompt_template(ledger, found)
    key: KeyPath = (*path, "source") if "source" in entry else (*path, COMPONENT)
    carry_source(ledger, key, found, home)
    if not ledger.handled((*path, COMPONENT)):
        ledger.carry((*path, COMPONENT), f"{home}.format", found.format)
    if entry.get("split") not in (None, "train"):
        ledger.carry((*path, "split"), f"{home}.split", str(entry["split"]))
    elif "split" in entry:
        ledger.drop((*path, "split"), "train is the default")
    return found.format or "auto"


def _trained(ledger: Ledger, path: KeyPath, entry: dict[str, Any], found: ForeignSource, *, on_input: bool) -> None:
    """Which turns of a data set are trained."""
    strategy = entry.get("masking_strategy")
    if strategy in MASKS:
        found.train_on, found.keys["train_on"] = MASKS[str(strategy)], (*path, "masking_strategy")
        ledger.idle("masking_strategy says it", (*path, "train_on_input"))
        return
    trained = ledger.flag((*path, "train_on_input"))
    if trained or (trained is None and on_input):
        found.train_on = "everything"
        found.notes["train_on"] = "torchtune's default for this builder" if trained is None else ""
        if trained is not None:
            found.keys["train_on"] = (*path, "train_on_input")
    elif trained is not None:
        ledger.drop((*path, "train_on_input"), "only answers are trained, by default")


def _prompt_template(ledger: Ledger, found: ForeignSource) -> None:
    """The tokenizer's template of texts before and behind each role's turns."""
    key = "tokenizer.prompt_template"
    value = ledger.value(key)
    if isinstance(value, str):
        ledger.drop(key, "a template in code: write `template`, a text for each role", matters=True)
    if not isinstance(value, dict) or found.format == "text":
        return
    texts = {}
    for role, around in value.items():
        if role not in TURNS or not isinstance(around, list) or len(around) != 2:
            ledger.drop(key, f"`{role}`: not texts before and behind a turn that Stoker knows", matters=True)
            return
        before, after = (str(part or "").replace("{", "{{").replace("}", "}}") for part in around)
        texts[str(role)] = f"{before}{{content}}{after}"
    found.template, found.keys["template"] = {"system": "{content}", "user": "{content}"} | texts, key


def _details(ledger: Ledger, path: KeyPath, entry: dict[str, Any], found: ForeignSource, name: str) -> None:
    style = str(entry.get("conversation_style") or "")
    if style:
        found.format = "sharegpt" if style == "sharegpt" else "messages"
        ledger.drop((*path, "conversation_style"), "`format`")
    column = entry.get("conversation_column")
    if column is not None:
        usual = "conversations" if found.format == "sharegpt" else "messages"
        if column != usual:
            found.columns[usual] = str(column)
        ledger.drop((*path, "conversation_column"), "`columns`" if column != usual else "Stoker's name as well")
    if entry.get("column") is not None:
        if entry["column"] != "text":
            found.columns = {"text": str(entry["column"])}
        ledger.drop((*path, "column"), "`columns`")
    mapping = entry.get("column_map")
    if isinstance(mapping, dict):
        # instruct_dataset calls the question `input`; alpaca's builders have Stoker's own names.
        names = {"input": "instruction"} if name == "instruct_dataset" else {}
        found.columns |= {names.get(str(ours), str(ours)): str(theirs) for ours, theirs in mapping.items()}
        found.columns = {ours: theirs for ours, theirs in found.columns.items() if ours != theirs}
        ledger.drop((*path, "column_map"), "`columns`")
    if name.startswith("alpaca") and found.template is None:
        found.template, found.notes["template"] = template_of("alpaca")
    packed = ledger.flag((*path, "packed"))
    if packed is not None and path[0] == "dataset":
        ledger.carry((*path, "packed"), "train.pack", packed)
    elif path[0] == "dataset":
        ledger.default("train.pack", False)
    for key, why, matters in (
        ("new_system_prompt", "no system message is added", True), ("filter_fn", "rows are not filtered", True),
        ("add_eos", "a document ends with the stop token, always", False),
        ("split_across_pack", "packed documents are whole, or split at seq_len", False),
        ("max_seq_len", "write `seq_len` under `train:`", True), ("packed", "as in training", False),
        ("name", "Stoker reads a hub data set whole: name the subset's files as `path`", True),
        ("source", "`path`", False),
    ):  # fmt: skip
        if key in entry and key != "source" and not ledger.handled((*path, key)):
            set_here = entry[key] not in (None, False)
            ledger.drop((*path, key), why if set_here else "not set", matters=matters and set_here)
