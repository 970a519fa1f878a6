"""Chat with a run; answers stream. /new starts a new conversation, /quit or Ctrl-D ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.cli.trust_options import add_trust, trusted
from stoker.errors import Problem, UserError
from stoker.job.task import task_of

if TYPE_CHECKING:
    from torch import nn

    from stoker.checkpoint.load_run import TunedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker chat``."""
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
    parser.add_argument("--prompt", help="one question, one answer")
    parser.add_argument("--system", help="a system message before the conversation")
    parser.add_argument("--compare", action="store_true", help="answer with and without the tuning")
    parser.add_argument("--at", default="last", metavar="CHECKPOINT", help="last, best, or a step (default: last)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the most likely token")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Answer one prompt, or hold a conversation."""
    if arguments.max_tokens < 1 or arguments.temperature < 0:
        raise UserError("--max-tokens must be above 0, and --temperature at least 0")
    from stoker.cli.report import quiet_libraries

    quiet_libraries()
    from stoker.checkpoint.load_run import open_run

    tuned = open_run(arguments.run, Path.cwd(), at=arguments.at, trusted=trusted(arguments))
    chat = _Chat(tuned, arguments)
    if arguments.prompt is not None:
        chat.ask(arguments.prompt)
        return 0
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{tuned.folder.path}, step {tuned.step}; /new starts a new conversation, /quit ends")
    while True:
        try:
            line = input("you> " if interactive else "").strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/new":
            chat.begin()
        elif line:
            try:
                chat.ask(line)
            except UserError as error:
                if not interactive:
                    raise
                print(*error.problems, sep="\n")


class _Chat:
    """A conversation with the tuned model, and beside it one with the model as it was."""

    def __init__(self, tuned: TunedRun, arguments: argparse.Namespace) -> None:
        self.tuned, self.arguments = tuned, arguments
        self.codec = tuned.text.codec.for_source(tuned.job.data[0], Path.cwd())
        self.untuned = _untuned(tuned) if arguments.compare else None
        self.begin()

    def begin(self) -> None:
        """Forgets what was said."""
        system = self.arguments.system
        first = [{"role": "system", "content": system}] if system else []
        self.turns = {"untuned": list(first), "tuned": list(first)} if self.untuned else {"tuned": list(first)}

    def ask(self, question: str) -> None:
        """Streams the answer, or both."""
        from stoker.models.adapters import without_adapter

        for name, turns in self.turns.items():
            asked = [*turns, {"role": "user", "content": question}]
            if self.untuned:
                label = "before" if name == "untuned" else f"after {self.tuned.step} steps"
                print(f"[{label}] ", end="", flush=True)
            if name == "untuned" and self.untuned is self.tuned.model:
                with without_adapter(self.tuned.model):
                    answer = self._stream(self.tuned.model, asked)
            else:
                answer = self._stream(self.untuned if name == "untuned" and self.untuned else self.tuned.model, asked)
            self.turns[name] = [*asked, {"role": "assistant", "content": answer}]

    def _stream(self, model: nn.Module, turns: list[dict[str, str]]) -> str:
        answer = ""
        for piece in self._pieces(model, turns):
            answer += piece
            print(piece, end="", flush=True)
        print()
        return answer

    def _pieces(self, model: nn.Module, turns: list[dict[str, str]]) -> Iterator[str]:
        from stoker.data.corpus import special_tokens_of
        from stoker.data.template_environment import TemplateRefused
        from stoker.data.tokenise import encode_prompt
        from stoker.models.generate import stream_answer
        from stoker.parallel.float64_mode import arithmetic_of

        if not task_of(self.tuned.job).chat and not self.tuned.text.own_template:
            ids = self.codec.tokenizer.encode(turns[-1]["content"]).ids  # a plain-text model continues it
        else:
            source = self.tuned.job.data[0]
            try:
                ids = encode_prompt(self.codec, turns, special_tokens_of(source, source.format))
            except TemplateRefused as error:
                raise UserError(f"the chat template refuses this conversation: {error}") from error
        context = self.tuned.text.context
        if context is not None and len(ids) >= context:
            message = f"the prompt is {len(ids):,} tokens, and the model was built for {context:,} with the answer"
            raise UserError(Problem(message, "shorten it, or begin a new conversation with /new"))
        yield from stream_answer(
            model,
            self.tuned.tokenizer,
            ids,
            self.codec.stop_ids,
            new_tokens=min(self.arguments.max_tokens, context - len(ids)) if context else self.arguments.max_tokens,
            temperature=self.arguments.temperature,
            around=arithmetic_of(self.tuned.device),
        )


def _untuned(tuned: TunedRun) -> nn.Module:
    from stoker.train.evaluate_run import untuned_model

    return tuned.model if tuned.job.tune.method != "full" else untuned_model(tuned, Path.cwd())
