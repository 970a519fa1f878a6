"""The command ``stoker``: imports only the command's module; converts errors to messages and exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from stoker.errors import UserError
from stoker.hardware.machine_limits import machine_problem  # while there is memory to load it
from stoker.terminal import escaped_output, give_up_output

# Descriptions of the commands. A command's module is stoker.cli.<verb>, loaded only on use, so that `stoker --help`
# does not wait for torch.
VERBS = {
    "new": "write a commented job file from a recipe",
    "check": "validate a job; print it as resolved, and where every value came from",
    "data": "audit the data: tokens and mask, rows in, used, cut, dropped and why",
    "plan": "which layout to train with, and what it takes",
    "verify": "prove that a layout computes what one process computes",
    "train": "train, or resume an earlier run of the same job",
    "node": "take part in a run of several nodes, with a supervisor on each",
    "table-server": "hold rows of embedding tables for processes that train",
    "chaos": "rehearse faults: train while they happen, and compare the end with an undisturbed run",
    "submit": "start a job over ssh, by Slurm, on Ray or by Kubernetes",
    "runs": "list the runs, and what their time went into",
    "logs": "print what the processes of a run have written, from all nodes",
    "stop": "end a run after it has saved: here, or submitted and on every node",
    "resume": "start a submitted run again, from its newest state",
    "describe": "describe a submitted run: state, reason, nodes, files",
    "rollouts": "show the answers that a step of ppo or grpo learnt from",
    "eval": "measure a run on data",
    "chat": "talk to a run",
    "ui": "open the page: begin, watch and compare runs in a browser",
    "report": "write runs as one HTML file, with their data inside",
    "serve": "answer requests of OpenAI's API with runs, exported folders or GGUF files",
    "keys": "make, list and remove the named keys of a server of models, and the users of the page",
    "export": "write a run as an adapter, merged weights or GGUF, and replay it",
    "cache": "list and clean what this node keeps of data and models at URLs",
    "tokenizer": "give a tokenizer new tokens for a corpus, or learn one from nothing",
    "import": "turn a file of LLaMA-Factory, Axolotl, TRL, torchtune, DeepSpeed or Accelerate into a job",
}
# Commands whose name is no Python name, or is taken by another module.
MODULES = {"import": "import_", "report": "run_report", "table-server": "table_server"}
INTERRUPTED = 130  # a shell's exit code for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 done, 2 wrong input, 3 cannot run, 1 anything else."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # child processes must not import files of the current folder
    with escaped_output():
        code = _guarded(words)
        give_up_output()
        return code


def _guarded(words: list[str]) -> int:
    """Runs the command; converts errors of the user and of the machine to messages, and raises bugs."""
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe (`stoker check job.yaml | head`)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        lacking = machine_problem(error)
        if lacking is None:
            raise
        print(f"error: {lacking}", file=sys.stderr)
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
    module = importlib.import_module(f"stoker.cli.{MODULES.get(verb, verb)}")
    parser = argparse.ArgumentParser(prog=f"stoker {verb}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    # Options may be placed between the job and its overrides.
    return int(module.run(parser.parse_intermixed_args(rest)))


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
            "`stoker VERB --help` explains a verb. Begin with `stoker new`, then `stoker check job.yaml`.",
        ]
    )


def unknown_verb(verb: str) -> str:
    """Returns the message for a command that does not exist."""
    import difflib

    near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
    hint = f"write `stoker {near[0]}`" if near else f"take one of {', '.join(VERBS)}"
    if verb.endswith((".yaml", ".yml")):
        hint = f"write `stoker check {verb}` or `stoker train {verb}`"
    return f"there is no verb `{verb}`; {hint}"


if __name__ == "__main__":
    sys.exit(main())
