"""The command ``stoker``: imports only the command's module; converts errors to messages and exit codes."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import stoker.hardware.process.parent_process  # noqa: F401 -- notes the parent, before the slow imports
from stoker.cli.output.print_problems import print_notes, print_problems
from stoker.errors import CodeFailed, Ended, Problem, UserError
from stoker.hardware.machine_limits import machine_problem  # while there is memory to load it
from stoker.resilience.stop_signals import exit_at_signals
from stoker.terminal import escaped_output, give_up_output

# Descriptions of the commands. A command's module is a file of `stoker.cli.commands`, loaded only on use, so that
# `stoker --help` does not wait for torch.
VERBS = {
    "new": "write a commented job file from a recipe",
    "check": "validate a job; print every resolved value and its source",
    "data": "audit the data: tokens, loss mask, rows used, truncated, dropped",
    "plan": "choose a layout by predicted memory, step time and cost",
    "verify": "test that a layout computes the same as a single process",
    "train": "train a job, or resume an earlier run of it",
    "node": "supervise one node of a multi-node run",
    "table-server": "serve rows of embedding tables to training processes",
    "chaos": "inject faults and compare the result with an undisturbed run",
    "submit": "start a job over ssh, Slurm, Ray or Kubernetes",
    "runs": "list runs and how their time was spent",
    "logs": "print the output of a run's processes, from all nodes",
    "stop": "save a checkpoint and stop a run, local or submitted",
    "resume": "restart a submitted run from its newest checkpoint",
    "describe": "describe a submitted run: state, reason, nodes, files",
    "rollouts": "show the answers that a ppo or grpo step was trained on",
    "eval": "evaluate a run: loss and accuracy, or scores of its answers",
    "chat": "chat with a run or a model",
    "ui": "start the web page: start, watch and compare runs in a browser",
    "report": "write runs as one self-contained HTML file",
    "serve": "serve runs, exported folders or GGUF files over OpenAI's API",
    "keys": "manage API keys of `stoker serve` and users of `stoker ui`",
    "export": "export a run as adapter, merged weights or GGUF, and verify it",
    "cache": "manage the cache of data and models downloaded from URLs",
    "tokenizer": "add tokens to a tokenizer, or train one from a corpus",
    "import": "convert a LLaMA-Factory, Axolotl, TRL or other config to a job",
}
# Commands whose name is not a Python name.
MODULES = {"import": "import_", "table-server": "table_server"}
# Commands whose only result is what they print: they end if nobody reads it any more. Others go on without output.
PRINTING = frozenset({"check", "data", "plan", "verify", "runs", "logs", "describe", "rollouts", "chat"})
INTERRUPTED = 130  # a shell's exit code for Ctrl-C
NO_READER = 141  # and for SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 done, 2 wrong input, 3 cannot run, 1 anything else."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes must not import files of the current folder
    needs_reader = not words or words[0] not in VERBS or words[0] in PRINTING
    with escaped_output(needs_reader=needs_reader), exit_at_signals():
        code = _guarded(words)
        give_up_output()
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process ends: within an exit function it was a traceback
    return code


def _guarded(words: list[str]) -> int:
    """Runs the command; converts errors of the user and of the machine to messages, and raises bugs."""
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe (`stoker check job.yaml | head`)
        return NO_READER
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        print_problems(error.problems)
        if isinstance(error, CodeFailed):
            print_notes(error)
        return error.exit_code
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # only users choose names
            print_problems([Problem("no file or folder can have so long a name", file=str(error.filename))])
            return UserError.exit_code
        lacking = machine_problem(error)
        if lacking is None:
            raise
        print_problems([lacking])
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"stoker {version('stoker')}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        raise UserError(unknown_verb(verb))
    module = importlib.import_module(f"stoker.cli.commands.{MODULES.get(verb, verb)}")
    parser = argparse.ArgumentParser(prog=f"stoker {verb}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    # Options may be placed between the job and its overrides.
    try:
        return int(module.run(parser.parse_intermixed_args(rest)))
    except Ended as ended:
        return ended.exit_code


def usage() -> str:
    """Returns the text of ``stoker --help``."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            "usage: stoker VERB [ARGUMENTS]",
            "",
            "Trains a large model from one short YAML file.",
            "",
            *lines,
            "",
            "Run `stoker VERB --help` for the options of a verb.",
            "Start with `stoker new`, then `stoker check job.yaml`.",
        ]
    )


def unknown_verb(verb: str) -> str:
    """Returns the message for a command that does not exist."""
    import difflib

    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"write `stoker {near[0]}`" if near else f"take one of {', '.join(VERBS)}"
    if verb.endswith((".yaml", ".yml")):
        hint = f"write `stoker check {verb}` or `stoker train {verb}`"
    return f"there is no verb `{verb}`; {hint}"


if __name__ == "__main__":
    sys.exit(main())
