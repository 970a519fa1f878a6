"""Chat templates written as one string for each role: their placeholders, and their translation to Jinja."""

from __future__ import annotations

import json
from string import Formatter

from stoker.job.blocks.source_block import TemplateBlock

TURNS = ("system", "user", "assistant", "tool")
TOKENS = {"bos": "bos_token", "eos": "eos_token"}  # placeholders of tokens, and their names in Jinja
CONTENT = "content"


class BadTemplate(ValueError):
    """A template's text is invalid; the message has the reason and a suggestion."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def pieces_of(role: str, text: str) -> list[tuple[str, str]]:
    """Returns a role's text as (literal, placeholder behind it); the last placeholder is empty.

    Raises:
        BadTemplate: braces that do not match, an unknown placeholder, or a turn without its content.
    """
    may = [CONTENT, *TOKENS] if role in TURNS else [*TOKENS]
    pieces: list[tuple[str, str]] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise BadTemplate(f"its braces do not match: {error}", "write {{ and }} for braces in the text") from error
    for literal, name, form, conversion in parsed:
        if name is not None and (name not in may or form or conversion):
            known = ", ".join(f"{{{one}}}" for one in may)
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            hint = f"write one of {known}, or {{{{ and }}}} for braces"
            raise BadTemplate(f"{{{shown}}} is not a placeholder here", hint)
        pieces.append((literal, name or ""))
    if role in TURNS and [name for _, name in pieces].count(CONTENT) != 1:
        raise BadTemplate("{content} must occur in it once", "write {content} where the turn's text goes")
    return [*pieces, ("", "")] if not pieces or pieces[-1][1] else pieces


def to_jinja(block: TemplateBlock) -> str:
    """Converts the template to a Jinja chat template, with which models are served."""
    system, user, assistant = (_expression(role, getattr(block, role)) for role in ("system", "user", "assistant"))
    stop = _expression("stop", block.stop)
    tool = "raise_exception('no text for the answers of tools')"
    if block.tool is not None:
        tool = _expression("tool", block.tool)
    pieces = pieces_of("assistant", block.assistant)
    asked = next(i for i, (_, name) in enumerate(pieces) if name == CONTENT)
    prompt = _joined([*pieces[:asked], (pieces[asked][0], "")])
    begin = f"{{{{ {_expression('begin', block.begin)} }}}}" if block.begin else ""
    return (
        f"{begin}{{% for message in messages %}}"
        f"{{% if message['role'] == 'system' %}}{{{{ {system} }}}}"
        f"{{% elif message['role'] == 'assistant' %}}{{{{ {assistant} + {stop} }}}}"
        f"{{% elif message['role'] == 'tool' %}}{{{{ {tool} }}}}"
        f"{{% else %}}{{{{ {user} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}"
    )


def _expression(role: str, text: str) -> str:
    return _joined(pieces_of(role, text))


def _joined(pieces: list[tuple[str, str]]) -> str:
    names = {CONTENT: "message['content']", **TOKENS}
    parts = []
    for literal, name in pieces:
        parts += ([json.dumps(literal, ensure_ascii=False)] if literal else []) + ([names[name]] if name else [])
    return " + ".join(parts) or "''"
