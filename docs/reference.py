"""Pages of the site that are generated: every key of a job, every verb, and every number that the page shows."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo

from stoker.cli.main import MODULES, VERBS
from stoker.job.keys.annotations import block_of, describe
from stoker.job.block import Block
from stoker.job.document.job_to_yaml import scalar
from stoker.job.schema import Job
from stoker.page.run_data.report_html import STATIC

WIDTH = 100  # columns of a verb's help


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages; called by mkdocs."""
    pages = {"reference/keys": key_lines(), "reference/verbs": verb_lines(), "glossary": glossary_lines()}
    for name, lines in pages.items():
        files.append(File.generated(config, f"{name}.md", content="\n".join(lines) + "\n"))
    return files


def key_lines() -> Iterator[str]:
    """The page of keys: a table for each block, in the order of the schema."""
    yield "# Keys of a job\n"
    yield "`stoker new` writes these as comments into a job; `stoker check` prints what each one is, and why.\n"
    yield from _block_lines(Job, "")


def _block_lines(block: type[Block], path: str) -> Iterator[str]:
    yield "| key | may be | default | meaning |"
    yield "| --- | --- | --- | --- |"
    inside: list[tuple[str, type[Block]]] = []
    for name, field in block.model_fields.items():
        inner, is_list = block_of(field.annotation)
        is_copy = (path, name) == ("evaluate", "data")  # the same keys as those of `data`
        if inner is not None and not is_copy:
            inside.append((f"{path}.{name}".lstrip(".") + "[]" * is_list, inner))
        yield f"| `{name}` | {_cell(describe(field))} | {_cell(_default(field))} | {_cell(str(field.description))} |"
    for key, inner in inside:
        yield f"\n## `{key}`\n\n{(inner.__doc__ or '').strip()}\n"
        yield from _block_lines(inner, key.removesuffix("[]"))


def glossary_lines() -> Iterator[str]:
    """The page of numbers, from the files that the page in the browser reads."""
    entries = json.loads((STATIC / "glossary.json").read_text(encoding="utf-8"))
    english, chinese = (json.loads((STATIC / f"messages.{name}.json").read_text("utf-8")) for name in ("en", "zh"))
    yield "# Glossary\n\nEvery number of the page, of `metrics.jsonl` and of plans.\n"
    yield "| number | what it is | unit | formula | healthy | moved by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for entry in entries:
        name, what, healthy = (f"g.{entry['id']}.{part}" for part in ("name", "what", "healthy"))
        cells = (
            f"**{english[name]}**<br>{chinese[name]}",
            f"{english[what]}<br>{chinese[what]}",
            entry["unit"],
            f"`{entry['formula']}`",
            f"{english[healthy]}<br>{chinese[healthy]}",
            f"`{entry['key']}`",
        )
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    return "" if value is None or isinstance(value, Block) else f"`{scalar(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def verb_lines() -> Iterator[str]:
    """The page of verbs: what `stoker VERB --help` prints."""
    yield "# Verbs\n"
    for verb, summary in VERBS.items():
        module = importlib.import_module(f"stoker.cli.commands.{MODULES.get(verb, verb)}")
        parser = argparse.ArgumentParser(
            prog=f"stoker {verb}",
            description=module.__doc__,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=WIDTH),
        )
        module.add_arguments(parser)
        yield f"## `{verb}`\n\n{summary[0].upper()}{summary[1:]}.\n\n```text\n{parser.format_help().rstrip()}\n```\n"
