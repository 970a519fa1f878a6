"""Chat with a run or a model. /new starts a new conversation, /quit or Ctrl-D exits. Ctrl-C stops an answer, and the
conversation goes on with its text so far; at the prompt it exits.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from stoker.cli.options.run_options import add_at, add_trust, trusted
from stoker.cli.output.print_problems import print_problems
from stoker.cli.preflight_names import require_run_or_model
from stoker.errors import UserError

if TYPE_CHECKING:
    from stoker.generate.generation_engine import GenerationEngine
    from stoker.generate.open_model import OpenModel
    from stoker.generate.request import Sampling

NOT_UTF8 = "is not text in UTF-8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker chat``."""
    parser.add_argument(
        "run", metavar="RUN", help="a run's folder, its name below runs/, or a model: folder, GGUF file or hub id"
    )
    parser.add_argument("--prompt", help="answer this one question and exit")
    parser.add_argument("--system", help="system message of the conversation")
    parser.add_argument("--compare", action="store_true", help="also answer with the untuned model")
    add_at(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="maximum length of an answer in tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 (default) is greedy decoding"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the K most likely tokens (default: 0, no limit)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="minimum probability, relative to the most likely token"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 makes repetition less likely")
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends an answer; repeatable"
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answers one prompt, or runs a conversation."""
    from stoker.cli.output.quiet_libraries import quiet_libraries

    if arguments.prompt == "":
        raise UserError("--prompt is empty")
    if arguments.max_tokens < 1:
        raise UserError("--max-tokens must be above 0")
    require_run_or_model(arguments.run, Path.cwd())
    sampling = _sampling(arguments)
    for option, text in (("--prompt", arguments.prompt), ("--system", arguments.system), ("--stop", arguments.stop)):
        _check_utf8(option, *(text if isinstance(text, list) else [text or ""]))
    quiet_libraries()
    from stoker.generate.open_model import open_model

    opened = open_model(arguments.run, Path.cwd(), at=arguments.at, trusted=trusted(arguments))
    interactive = arguments.prompt is None and sys.stdin.isatty()
    chat = _Chat(opened, arguments, sampling, interactive=interactive)
    if arguments.prompt is not None:
        chat.ask(arguments.prompt)
        return 0
    if interactive:
        step = "" if opened.step is None else f", step {opened.step}"
        print(f"{opened.name}{step}; /new starts a new conversation, Ctrl-C stops an answer, /quit exits")
    return _converse(chat)


def _converse(chat: _Chat) -> int:
    """Answers the lines of standard input; returns the exit code, which in a pipe is that of the last error."""
    exit_code = 0
    while True:
        try:
            line = input("you> " if chat.interactive else "").strip()
        except EOFError:
            return exit_code
        except UnicodeDecodeError as error:
            raise UserError(f"standard input {NOT_UTF8}") from error
        _check_utf8("standard input", line)
        if line == "/quit":
            return exit_code
        if line == "/new":
            chat.begin()
        elif line:
            try:
                chat.ask(line)
            except UserError as error:
                if chat.interactive:
                    print(*error.problems, sep="\n")
                else:
                    print_problems(error.problems)
                    exit_code = error.exit_code


def _check_utf8(what: str, *texts: str) -> None:
    """Rejects texts of bytes that are not UTF-8, which Python reads as halves of surrogate pairs."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{what} {NOT_UTF8}") from error


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from stoker.generate.request import Sampling

    return Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
    )


class _Chat:
    """A conversation with the model, and optionally a parallel one with the untuned model."""

    def __init__(
        self, opened: OpenModel, arguments: argparse.Namespace, sampling: Sampling, *, interactive: bool
    ) -> None:
        self.opened, self.arguments, self.sampling, self.interactive = opened, arguments, sampling, interactive
        self.engine = opened.engine()
        self.untuned = _untuned(opened, self.engine) if arguments.compare else None
        self.begin()

    def begin(self) -> None:
        """Starts a new conversation."""
        system = self.arguments.system
        first = [{"role": "system", "content": system}] if system else []
        self.turns = {"untuned": list(first), "tuned": list(first)} if self.untuned else {"tuned": list(first)}

    def ask(self, question: str) -> None:
        """Streams the answer, or both answers."""
        from stoker.generate.request import BASE

        for name, turns in self.turns.items():
            asked = [*turns, {"role": "user", "content": question}]
            engine, adapter = self.engine, None
            if self.untuned is not None:
                print("[before] " if name == "untuned" else f"[after {self.opened.step} steps] ", end="", flush=True)
                if name == "untuned":
                    engine, adapter = self.untuned, BASE if self.untuned is self.engine else None
            self.turns[name] = [*asked, {"role": "assistant", "content": self._stream(engine, adapter, asked)}]

    def _stream(self, engine: GenerationEngine, adapter: str | None, turns: list[dict[str, str]]) -> str:
        from stoker.generate.answer_text import stream_answer
        from stoker.generate.request import Request

        opened = self.opened
        # A plain-text model continues the last message.
        ids = opened.prompt_ids(turns) if opened.chats else opened.text_ids(turns[-1]["content"])
        request = Request(
            tuple(ids),
            self.arguments.max_tokens,
            self.sampling,
            stop_ids=opened.codec.stop_ids,
            adapter=adapter,
            remember=True,  # the next question starts with all of this
        )
        answer = ""
        pieces = stream_answer(engine, opened.tokenizer, request, self.arguments.stop)
        with _noted_interrupt() if self.interactive else nullcontext(Event()) as interrupted, closing(pieces):
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
                if interrupted.is_set():
                    break
        print()
        return answer


@contextmanager
def _noted_interrupt() -> Iterator[Event]:
    """Within the block Ctrl-C sets the event, so that no pass through the model is cut off; a second one exits."""
    interrupted = Event()

    def note(number: int, frame: Any) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _untuned(opened: OpenModel, engine: GenerationEngine) -> GenerationEngine:
    if opened.run is None:
        raise UserError("--compare needs a run: a model alone has no untuned version")
    if opened.untuned:
        return engine
    from stoker.evaluate.measure_run import untuned_model
    from stoker.generate.decoder import decoder_of
    from stoker.generate.generation_engine import GenerationEngine

    model = untuned_model(opened.run, Path.cwd())
    return GenerationEngine(decoder_of(model, opened.run.device, context=opened.decoder.context), tries_threads=True)
