"""Paths of keys, and the blocks and fields of the schema that they lead to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from stoker.errors import Problem, UserError
from stoker.job.block import Block
from stoker.job.keys.annotations import block_of
from stoker.job.schema import Job
from stoker.job.targets import TargetBlock
from stoker.job.task_spec import TASKS

KeyPath = tuple[str | int, ...]

# Blocks that a list of all keys does not enter: the sources to evaluate on, which have the keys of `data`; the targets.
TARGET = "target"
APART: tuple[KeyPath, ...] = (("evaluate", "data"), (TARGET,))

_PART = re.compile(r"([^.\[\]]+)|\[(\d{1,6})\]")


def dotted(path: KeyPath) -> str:
    """``("data", 0, "path")`` as ``data[0].path``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_key(text: str) -> KeyPath:
    """Parses ``data[0].path`` to ``("data", 0, "path")``. Raises UserError if the text is not a path."""
    path: list[str | int] = []
    position = 0
    while position < len(text):
        if path and text[position] == ".":
            position += 1
        found = _PART.match(text, position)
        if found is None or (found[1] and path and text[position - 1] != "."):
            break
        path.append(found[1] if found[1] else int(found[2]))
        position = found.end()
    if not path or position < len(text) or text.endswith(".") or isinstance(path[0], int):
        raise UserError(Problem(f"`{text}` is not a key", "write it as `train.lr` or `data[0].path`"))
    return tuple(path)


def field_at(path: KeyPath) -> tuple[FieldInfo | None, KeyPath]:
    """Returns the field a path leads to or into, and the part of the path that names it, index included."""
    block: type[Block] | None = Job
    field: FieldInfo | None = None
    depth = 0
    while depth < len(path):
        part = path[depth]
        if block is None or part not in block.model_fields:
            break
        field = block.model_fields[str(part)]
        block, is_list = block_of(field.annotation)
        depth += 1
        if is_list and depth < len(path) and isinstance(path[depth], int):
            depth += 1
        elif is_list:
            break
    return field, path[:depth]


def block_at(path: KeyPath) -> type[Block] | None:
    """Returns the block at a path: Job for the empty path, None if the path does not lead to a block."""
    if not path:
        return Job
    field, found = field_at(path)
    if field is None or found != path:
        return None
    block, is_list = block_of(field.annotation)
    return block if is_list == isinstance(path[-1], int) else None


@cache
def parents_of_keys() -> dict[str, tuple[KeyPath, ...]]:
    """Maps every key of the schema to the blocks that contain it, outermost first; without list indices."""
    found: dict[str, list[KeyPath]] = {}
    for path in (*schema_paths(), *target_paths()):
        found.setdefault(str(path[-1]), []).append(path[:-1])
    return {key: tuple(sorted(parents, key=len)) for key, parents in found.items()}


def schema_paths(block: type[Block] = Job, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields every key of the schema in order, without list indices; does not descend into `APART`."""
    for name, field in block.model_fields.items():
        yield (*path, name)
        inner, _ = block_of(field.annotation)
        if inner is not None and (*path, name) not in APART:
            yield from schema_paths(inner, (*path, name))


def target_paths() -> Iterator[KeyPath]:
    """Yields every key below ``target``."""
    return schema_paths(TargetBlock, (TARGET,))


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields (path, value) of every value that is neither a block nor a list of blocks; an empty such list is a
    leaf.
    """
    if isinstance(value, Block):
        for name in type(value).model_fields:
            yield from leaves(getattr(value, name), (*path, name))
    elif isinstance(value, list) and value and isinstance(value[0], Block):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


# Example values of keys whose default is ``auto`` or unset.
EXAMPLES = {
    "tune.modules_to_save": "[lm_head]",
    "tune.text": "Is this sentence kind or unkind?",
    "version": "1", "task": "sft", "model.name": "smollm2-135m", "model.revision": "main",
    "model.tokenizer": "smollm2-135m", "data.path": "my.jsonl", "data.weight": "1", "data.split": "train",
    "model.stop": '"<|im_end|>"', "model.special_tokens.bos": "<s>", "model.special_tokens.eos": '"<|im_end|>"',
    "model.special_tokens.additional": '["<|im_start|>"]',
    "model.special_tokens.pad": "<pad>", "model.special_tokens.unk": "<unk>",
    "data.template.user": r'"Q: {content}\n"', "data.template.tool": r'"Tool: {content}\n"',
    "data.template.assistant": r'"A:\n{content}"', "data.template.stop": '"{eos}"',
    "data.template.system": '"{content}"', "data.template.begin": '"{bos}"',
    "data.template_arguments": "{enable_thinking: false}",
    "data.columns": "{instruction: question}", "mix.temperature": "2", "tune.alpha": "32", "steps": "100",
    "epochs": "1", "output": "runs/mine", "train.lr": "2e-4", "train.batch": "8", "train.micro_batch": "8",
    "train.accumulation": "1", "train.seq_len": "1024", "train.pack": "true", "train.beta2": "0.999",
    "train.weight_decay": "0.01", "train.average": "0.99", "train.wandb": "my-project",
    "train.mlflow": "my-experiment", "model.config": "{num_hidden_layers: 12}",
    "evaluate.fraction": "0.05", "evaluate.every": "100",
    "checkpoint.every": "100", "checkpoint.keep_every": "1000", "checkpoint.to": "checkpoints", "faults.requeue": "99",
    "faults.nodes.min": "2", "faults.nodes.max": "3",
    "export.sync.to": "redis://127.0.0.1:6379/0", "export.sync.every_seconds": "10", "export.sync.every_steps": "100",
    "parallel.data": "1",
    **{f"{name}.{key}": text for name, t in TASKS.items() if t.block for key, text in t.block.examples.items()},
}  # fmt: skip


def example_of(path: KeyPath) -> str:
    """Returns an example value for a key, as YAML text."""
    key = dotted(tuple(part for part in path if isinstance(part, str))).replace("evaluate.data.", "data.")
    field, _ = field_at(path)
    default = None if field is None else field.default
    if key not in EXAMPLES and field is not None and field.examples:
        return json.dumps(field.examples[0])
    if key in EXAMPLES or not isinstance(default, str | int | float):
        return EXAMPLES.get(key, "auto")
    return str(default).lower() if isinstance(default, bool) else f"{default}"


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of a job's mapping by dotted key, such as ``data.0.path``."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = dict(enumerate(value)).items()
    else:
        return {prefix: value}
    return {k: v for name, item in items for k, v in flat(item, f"{prefix}.{name}" if prefix else str(name)).items()}
