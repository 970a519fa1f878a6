"""Show the answers that a ppo or grpo step was trained on: text, scores, and values of each token."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.options.run_options import add_trust, trusted
from stoker.errors import UserError
from stoker.json_values import finite

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from stoker.train.rollouts.rollout import Rollout

SHOWN = 16  # default number of answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker rollouts``."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name below runs/")
    parser.add_argument("--step", type=int, metavar="N", help="step of the run (default: the last)")
    parser.add_argument("--worst", action="store_true", help="sort by score, lowest first, without grouping by prompt")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"maximum number of answers (default: {SHOWN}; all with --json)"
    )
    parser.add_argument(
        "--by",
        default="advantage",
        metavar="NAME",
        help="quantity that colours the tokens: advantage (default), old (log-probability), kl (old - reference), "
        "value, reward, return, entropy or sampled",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the answers."""
    from stoker.job.load_job import load_job
    from stoker.job.trust import code_problems
    from stoker.runs.find_run import find_run
    from stoker.train.rollouts.step_rollouts import rollouts_of_step

    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit {arguments.limit} shows no answers; write 1 or more")
    folder = find_run(arguments.run, Path.cwd())
    loaded = load_job(folder.job, trusted(arguments))
    found = rollouts_of_step(folder, loaded.job, arguments.step)
    chosen = sorted(found.rollouts, key=lambda r: r.score) if arguments.worst else list(found.rollouts)
    chosen = chosen[: arguments.limit or (None if arguments.json else SHOWN)]
    if not arguments.json:
        names = found.iterations[0].rollouts[0].token_values()
        if arguments.by not in names:
            raise UserError(f"--by {arguments.by}: the tokens of this run have {', '.join(names)}")
    if problems := code_problems(loaded):
        raise UserError(*problems)
    from stoker.cli.output.quiet_libraries import quiet_libraries
    from stoker.models.tokenizers.job_tokenizer import load_tokenizer

    quiet_libraries()
    tokenizer = load_tokenizer(loaded.job, Path.cwd()).backend_tokenizer
    if not arguments.json:
        from stoker.cli.output.rollout_view import show

        show(found, chosen, tokenizer, by=arguments.by, together=not arguments.worst)
        return 0
    first = found.iterations[0]
    answer = {
        "run": str(folder.path),
        "step": found.step,
        "iteration": first.number,
        "iteration_step": first.step,
        "figures": {name: finite(value) for name, value in first.figures.items()},
        "answers": [_answer(rollout, tokenizer) for rollout in chosen],
    }
    print(json.dumps(answer, ensure_ascii=False, allow_nan=False))
    return 0


def _answer(rollout: Rollout, tokenizer: Tokenizer) -> dict[str, Any]:
    from stoker.cli.output.rollout_view import token_texts

    pieces = token_texts(tokenizer, rollout.answer_ids)
    return {
        "prompt": rollout.prompt,
        "sample": rollout.sample,
        "source": rollout.source,
        "row": rollout.row,
        "prompt_text": tokenizer.decode(rollout.prompt_ids.tolist(), skip_special_tokens=False),
        "answer_text": "".join(pieces),
        "score": finite(rollout.score),
        "rewards": {name: finite(value) for name, value in rollout.rewards.items()},
        "ended": rollout.ended,
        "length": rollout.length,
        "kl": None if rollout.kl is None else finite(rollout.kl),
        "ids": rollout.answer_ids.tolist(),
        "texts": pieces,
        "tokens": {name: [finite(v) for v in values.tolist()] for name, values in rollout.token_values().items()},
    }
