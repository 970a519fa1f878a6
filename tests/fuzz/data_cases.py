"""Spoilt data files of every kind: rows, cells, bytes, archives and Parquet, each given to the audit."""

from __future__ import annotations

import csv
import gzip
import io
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fixtures import QUESTIONS, instruction
from forked import Case
from mutate import DEEP, ESCAPES, STRINGS, dumped, spoil_bytes, spoil_value

KINDS = ("jsonl", "jsonl", "json", "csv", "tsv", "parquet", "txt", "md", "ndjson")
SETTINGS = [
    "format: messages", "format: instruction", "format: sharegpt", "format: prompt", "format: text",
    "format: preference",
    "columns: {prompt: question, completion: topic}", "columns: {a: b}", "split: '[:3]'", "split: '[50%:]'",
    "split: test",
    "split: '[-2:]'", "template: chatml", "template: plain", "template: none", "template: x.jinja", "train_on: last",
    "too_long: drop", "too_long: split", "stream: true", "weight: 2", "max_dropped: 1.0",
]  # fmt: skip
TEMPLATES = [
    "{{ messages }}", "{% for m in messages %}{{ m.content }}", "{{ x.y.z }}", "{{ messages[99].content }}",
    "{{ 1/0 }}",
    "{{ raise_exception('no') }}", "{{ 'x' * 100000 }}", "{% include 'x' %}", "", "\0",
    "{{ messages[0]['content'] + 1 }}",
    "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}{{ eos_token }}", "{{ strftime_now('%Y') }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ " + "(" * 2000 + " }}", "{{ messages|sort|map('x') }}",
]  # fmt: skip


def rows_of(rng: random.Random) -> list[Any]:
    """Sound rows of one format."""
    turns = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "Paris."}]
    shared = [{"from": "human", "value": QUESTIONS[1]}, {"from": "gpt", "value": "Well."}]
    chosen = {"prompt": QUESTIONS[2], "chosen": "Blue sea.", "rejected": "No."}
    row = rng.choice(
        [
            None,
            {"messages": [{"role": "system", "content": "Be kind."}, *turns, *turns], "tools": [], "id": 5},
            {"conversations": shared, "system": "Be kind."},
            {"prompt": QUESTIONS[3], "completion": "7"},
            {"text": "The sea is blue."},
            {"prompt": turns[:1], "completion": turns[1:]},
            chosen,
            {"chosen": turns, "rejected": turns},
        ]
    )
    return [instruction(number) if row is None else {**row, "n": number} for number in range(12)]


def data_cases(seed: int, count: int, fixtures: Path) -> Iterator[Case]:
    """Cases that audit a job over a spoilt file."""
    for number in range(count):
        rng = random.Random(f"data-{seed}-{number}")
        kind = rng.choice(KINDS)
        content = _content(rng, kind)
        name = f"data.{kind}"
        if rng.random() < 0.2:
            name, content = _packed(rng, name, content)
        settings = rng.sample(SETTINGS, rng.choice([0, 0, 0, 1, 1, 2]))
        template = rng.choice(TEMPLATES)
        yield Case(f"data-{seed}-{number}", partial(_run, name, content, settings, template, fixtures))


def _content(rng: random.Random, kind: str) -> bytes:
    rows = rows_of(rng)
    for _ in range(rng.choice([0, 1, 1, 3])):
        at = rng.randrange(len(rows))
        rows[at] = spoil_value(rng, rows[at])
    if kind == "parquet":
        content = _parquet(rng, rows)
    elif kind in ("csv", "tsv"):
        content = _table(rng, rows, kind)
    elif kind in ("txt", "md"):
        content = "\n\n".join([*QUESTIONS, rng.choice(STRINGS), rng.choice(ESCAPES)]).encode("utf-8", "surrogatepass")
    elif kind == "json":
        content = dumped(rng.choice([rows, {"data": rows}, rows[0], {"a": rows, "b": rows}])).encode()
    else:
        lines = [dumped(row) for row in rows]
        if rng.random() < 0.3:
            lines.insert(
                rng.randrange(12),
                rng.choice(
                    [
                        "",
                        " ",
                        "null",
                        "1",
                        "[]",
                        "{",
                        '{"a": 1,}',
                        '{"a": 1} x',
                        "// c",
                        '{"a": 1e999999}',
                        '{"a": NaN}',
                        '{"messages": ' + "[" * DEEP + "]" * DEEP + "}",
                        "[" * 200_000,
                        '{"a": ' + "1" * 5000 + "}",
                        '{"text": "' + "x" * 1_000_000 + '"}',
                        '{"text": "\\ud800"}',
                        '{"text": "\\u0000"}',
                        "\0" * 100,
                        '{"text": "a", "text": "b"}',
                        "\n" * 20_000,
                    ]
                ),
            )
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice([0, 0, 1, 2])):
        content = spoil_bytes(rng, content)
    return content


def _table(rng: random.Random, rows: list[Any], kind: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter="\t" if kind == "tsv" else rng.choice(",;|"))
    first = next((row for row in rows if isinstance(row, dict) and row), {"text": ""})
    writer.writerow(rng.choice([list(first), list(first), list(first) * 2, [], [f"c{i}" for i in range(500)]]))
    for row in rows:
        cells = list(row.values()) if isinstance(row, dict) else [row]
        writer.writerow([cell if isinstance(cell, str) else dumped(cell) for cell in cells])
    return out.getvalue().encode("utf-8", "surrogatepass")


def _parquet(rng: random.Random, rows: list[Any]) -> bytes:
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"text": ["a"] * 12, "prompt": ["b"] * 12, "completion": ["c"] * 12}
    odd = {
        "bytes": [b"\xff"] * 12, "day": [datetime.date(1, 1, 1)] * 12, "cost": [decimal.Decimal("1.5")] * 12,
        "list": [[["a"]]] * 12, "struct": [{"role": "user", "content": None}] * 12, "none": [None] * 12,
        "number": [1.5] * 12, "time": [datetime.timedelta(1)] * 12, "messages": [[{"role": "user",
        "content": "a"}]] * 12,
    }  # fmt: skip
    for name in rng.sample(sorted(odd), 2):
        columns[rng.choice([name, "text", "prompt", "messages", "a\x1b[31m"])] = odd[name]
    try:
        table = pa.Table.from_pylist(rows) if rng.random() < 0.5 else pa.table(columns)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError, AttributeError):
        table = pa.table(columns)
    if rng.random() < 0.1:
        table = rng.choice([table.slice(0, 0), table.select([]), pa.table([["a"], ["b"]], names=["text", "text"])])
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=5, compression=rng.choice(["snappy", "none", "zstd"]))
    return out.getvalue()


def _packed(rng: random.Random, name: str, content: bytes) -> tuple[str, bytes]:
    import zstandard

    suffix = rng.choice(["gz", "zst"])
    packed = gzip.compress(content) if suffix == "gz" else zstandard.compress(content)
    packed = rng.choice([packed, packed, spoil_bytes(rng, packed), packed[: len(packed) // 2], content, packed + b"x"])
    return f"{name}.{suffix}", packed


def _run(name: str, content: bytes, settings: list[str], template: str, fixtures: Path) -> int:
    from stoker.cli.main import main

    Path("tiny").symlink_to(fixtures / "tiny")
    Path("x.jinja").write_text(template)
    Path(name).write_bytes(content)
    keys = {setting.partition(":")[0]: setting for setting in settings}
    lines = ["task: sft", "model: tiny", "steps: 5", "train: {seq_len: 128}", "data:", f"  - path: {name}"]
    Path("job.yaml").write_text("\n".join([*lines, *(f"    {setting}" for setting in keys.values())]))
    return main(["data", "job.yaml"])
