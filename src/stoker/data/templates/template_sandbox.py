"""Runs chat templates, which are untrusted programs, in a separate process with bounded time and memory.

The process communicates only by its answer, which is JSON. Its processor time is a budget: it begins with `SECONDS`,
each rendering adds the time of a normal one, and the kernel ends the process when the budget is used up.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from stoker.errors import Problem, UserError

if TYPE_CHECKING:
    from stoker.data.files.rows import Chat
    from stoker.data.templates.chat_template import ChatTemplate
    from stoker.data.templates.render_row import RenderedRow
    from stoker.data.templates.special_text import SpecialText

SECONDS = 3.0  # processor time of a process, before its renderings add to it
SECONDS_A_RENDERING = 0.02
SECONDS_A_CHARACTER = 2e-6
MEMORY = 2 << 30  # bytes of its address space
OUTPUT, OUTPUT_A_CHARACTER = 1 << 18, 64  # characters of a rendering, and for each that went in


class _Exceeded(Exception):
    """A template exceeded its limits."""


def render(template: ChatTemplate, messages: Sequence[Any], tools: Sequence[Any] | None, *, prompt: bool) -> str:
    """`ChatTemplate.render` in the templates' process.

    Raises:
        TemplateRefused: as there.
        UserError: the template is not valid Jinja, or takes too much time or memory.
    """
    text: str = _ask(_render, template, messages, tools, prompt)
    return text


def render_examples(
    template: ChatTemplate,
    rows: Sequence[tuple[Chat, SpecialText | None]],
    train_on: str,
) -> list[RenderedRow]:
    """`stoker.data.templates.render_row.render_example` of each row in the templates' process.

    Raises:
        UserError: as `render` does.
    """
    from stoker.data.templates.chat_template import Rendered
    from stoker.data.templates.render_row import RenderedRow

    found = []
    for answer in _ask(_examples, template, rows, train_on) if rows else []:
        texts = [Rendered(**{**text, "spans": tuple((a, b) for a, b in text["spans"])}) for text in answer["texts"]]
        found.append(RenderedRow(tuple(texts), answer["reason"], tuple(answer["ignored"]), answer["untrained"]))
    return found


def arguments_of(source: str) -> set[str]:
    """`stoker.data.templates.source_template.arguments_of` in the templates' process."""
    return set(_ask(_arguments, source))


# --- the parent's side


class _Child:
    """The sandbox process, with a lock for one request at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({SECONDS})"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )  # Ctrl-C is not for it

    def ask(self, request: bytes) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            _send(self.process.stdin, request)
            answer = _receive(self.process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            return {"exceeded": _how_it_ended(self.process.wait())}
        content: dict[str, Any] = json.loads(answer)
        return content

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


_children: dict[int, _Child] = {}  # by process id: a fork does not share its parent's
_lock = threading.Lock()


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of this module in the templates' process."""
    from stoker.data.templates.template_environment import TemplateRefused

    try:
        request = pickle.dumps((function, arguments))
    except RecursionError as error:
        raise TemplateRefused("the messages or tools are nested too deeply") from error
    with _lock:
        child = _children.get(os.getpid())
        if child is None:
            child = _children[os.getpid()] = _Child()
            atexit.register(child.close)
        answer = child.ask(request)
        if "exceeded" in answer:
            del _children[os.getpid()]
            atexit.unregister(child.close)
            child.close()
    if "refused" in answer:
        raise TemplateRefused(answer["refused"])
    if "exceeded" in answer:
        message = f"the chat template {answer['exceeded']}"
        raise UserError(Problem(message, "name another one in data[].template", key="template"))
    if "invalid" in answer:
        raise UserError(Problem(answer["invalid"], "see data[].template for others", key="template"))
    return answer["value"]


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"does not come to an end: it took more than {SECONDS:g} s of processor time"
    return f"ended the process that it ran in, perhaps by its memory (exit code {code})"


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes | None:
    """Receives a message; returns None if the other side has ended."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = int.from_bytes(head, "little")
    content = stream.read(size)
    return content if len(content) == size else None


# --- the side that answers


def _render(template: ChatTemplate, messages: Sequence[Any], tools: Sequence[Any] | None, prompt: bool) -> str:
    return template.render(messages, tools, prompt=prompt)


def _examples(template: ChatTemplate, rows: Sequence[tuple[Any, Any]], train_on: str) -> list[dict[str, Any]]:
    from stoker.data.templates.render_row import render_example

    outcomes = (render_example(template, example, train_on, special) for example, special in rows)
    return [{**vars(outcome), "texts": list(map(vars, outcome.texts))} for outcome in outcomes]


def _arguments(source: str) -> list[str]:
    from stoker.data.templates.source_template import arguments_of

    return sorted(arguments_of(source))


def charge_render_time(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> int:
    """Adds a rendering's processor time to the budget; returns the number of characters that it may write."""
    size = sum(
        len(value) if isinstance(value, str) else len(str(value)) for turn in messages for value in turn.values()
    )
    size += len(str(tools)) if tools else 0
    left, _ = signal.getitimer(signal.ITIMER_PROF)
    more = SECONDS_A_RENDERING + SECONDS_A_CHARACTER * size
    signal.setitimer(signal.ITIMER_PROF, min(max(left, 1e-3) + more, SECONDS + SECONDS_A_CHARACTER * size))
    return OUTPUT + OUTPUT_A_CHARACTER * size


def abort_render(what: str) -> None:
    """Ends the request: the template exceeded a limit."""
    raise _Exceeded(what)


def _answer(request: bytes) -> dict[str, Any]:
    from stoker.data.templates.template_environment import InvalidTemplate, TemplateRefused

    function, arguments = pickle.loads(request)
    try:
        return {"value": function(*arguments)}
    except TemplateRefused as error:
        return {"refused": str(error)}
    except InvalidTemplate as error:
        return {"invalid": str(error)}
    except _Exceeded as error:
        return {"exceeded": str(error)}
    except MemoryError:
        return {"exceeded": f"takes more than {MEMORY >> 30} GiB of memory"}


def in_template_process() -> bool:
    """Returns whether this is the process that templates run in."""
    return _serving.is_set()


_serving = threading.Event()


def serve(seconds: float) -> None:
    """Answers requests until the asking side closes the pipe."""
    _serving.set()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while (request := _receive(sys.stdin.buffer)) is not None:
        try:
            answer = json.dumps(_answer(request)).encode()
        except MemoryError:
            answer = json.dumps({"exceeded": f"takes more than {MEMORY >> 30} GiB of memory"}).encode()
        _send(sys.stdout.buffer, answer)
