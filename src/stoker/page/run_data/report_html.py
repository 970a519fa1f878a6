"""Writes a report as one HTML file: the page's own modules, texts and styles, with the data that they show.

Modules become `data:` addresses in an import map, since modules inside a file have no addresses of their own. The file
has a content policy that forbids every request, so no data leaves the reader's machine.
"""

from __future__ import annotations

import base64
import html
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.json_values import finite

STATIC = Path(__file__).parents[1] / "static"
FIRST = "report.js"
LANGUAGES = ("en", "zh")
POLICY = "default-src 'none'; script-src data: 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_IMPORT = re.compile(r"""(?P<before>\bfrom\s*|\bimport\(\s*|\bimport\s+)"(?P<path>\.{1,2}/[\w./-]+)\"""")


def report_html(answers: Mapping[str, Any], language: str = "") -> str:
    """Returns the file's text.

    Args:
        answers: the API's answers, by address without its query: ``/api/runs``, ``/api/runs/ID``,
            ``/api/runs/ID/events``, ``/api/runs/ID/metrics`` ...
        language: ``en`` or ``zh``; empty for that of the reader's browser.
    """
    inside = {
        "language": language,
        "time": time.time(),
        "answers": answers,
        "glossary": json.loads(_text("glossary.json")),
        "messages": {name: json.loads(_text(f"messages.{name}.json")) for name in LANGUAGES},
    }
    imports = {f"stoker/{name}": _address(text) for name, text in modules(FIRST).items()}
    runs = answers.get("/api/runs", {}).get("runs", [])
    title = ", ".join(str(run.get("name", "")) for run in runs)
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="{language or "en"}"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_text('style.css')}{_text('vendor/uplot.css')}</style>",
            f'<script type="application/json" id="report">{_inline(inside)}</script>',
            f'<script type="importmap">{_inline({"imports": imports})}</script>',
            f'</head><body><div id="app"></div><script type="module">import "stoker/{FIRST}";</script></body></html>',
            "",
        )
    )


def modules(first: str) -> dict[str, str]:
    """Returns a module and all that it imports, by path below the static folder, importing each other by bare names."""
    found: dict[str, str] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        folder = Path(name).parent

        def bare(match: re.Match[str], folder: Path = folder) -> str:
            path = (STATIC / folder / match["path"]).resolve().relative_to(STATIC.resolve()).as_posix()
            waiting.append(path)
            return f'{match["before"]}"stoker/{path}"'

        found[name] = _IMPORT.sub(bare, _text(name))
    return found


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _address(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _inline(value: Any) -> str:
    """JSON that cannot end the script around it."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
