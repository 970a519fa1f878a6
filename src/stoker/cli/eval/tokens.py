"""``stoker eval --by-token``: the loss of each trained token of some sequences."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.options.run_options import trusted
from stoker.cli.output.amounts import pluralise
from stoker.cli.output.data_view import CLOSE, OPEN
from stoker.errors import Problem, UserError
from stoker.json_values import finite
from stoker.terminal import escape_control_characters

if TYPE_CHECKING:
    import numpy as np

    from stoker.checkpoint.load_run import TunedRun
    from stoker.data.sample_preview import SamplePreview, SequencePreview


@dataclass(frozen=True)
class _Window:
    """Sequences of a run or of given data.

    Attributes:
        total: total number; None for no end.
        packed: sequences as the run packs them; None if the rows themselves were requested.
    """

    total: int | None
    samples: Sequence[SamplePreview]
    packed: Sequence[SequencePreview] | None = None


def add_by_token(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``--by-token``."""
    group = parser.add_argument_group("loss of each token")
    meaning = (
        "print the loss of each trained token of N sequences of DATA, or of the run's data as `stoker data` shows it"
    )
    group.add_argument("--by-token", type=int, metavar="N", help=meaning)
    group.add_argument("--offset", type=int, metavar="N", help="index of the first sequence (default: 0)")
    group.add_argument("--packed", action="store_true", help="use the packed sequences of the run, in its order")


def check_by_token(arguments: argparse.Namespace) -> None:
    """Rejects options that do not go together."""
    if arguments.by_token is None:
        if arguments.offset is not None or arguments.packed:
            raise UserError("--offset and --packed choose sequences of --by-token N")
        return
    if arguments.by_token < 1 or (arguments.offset or 0) < 0:
        raise UserError("--by-token must be above 0, and --offset at least 0")
    others = ("answers", "tasks", "prompts", "against", "compare", "quantise")
    if given := [name for name in others if getattr(arguments, name)]:
        raise UserError(f"--by-token and --{given[0]} are separate evaluations; run one after the other")
    if arguments.packed and arguments.data is not None:
        raise UserError(Problem("--packed shows the run's own sequences", "leave DATA out, or --packed"))


def run_by_token(arguments: argparse.Namespace) -> int:
    """Computes and prints the losses."""
    import numpy as np

    from stoker.checkpoint.load_run import open_run
    from stoker.data.token_cache import Row
    from stoker.evaluate.token_losses import check_token_losses, token_losses
    from stoker.job.load_job import load_job
    from stoker.runs.find_run import find_run

    folder = find_run(arguments.run, Path.cwd())
    check_token_losses(load_job(folder.job, trusted(arguments)).job, folder)
    tuned = open_run(arguments.run, Path.cwd(), at=arguments.at, trusted=trusted(arguments))
    window = _window(arguments, tuned)
    rows = [Row(np.array(each.ids, np.uint32), np.array(each.trained)) for each in window.samples]
    losses = token_losses(tuned, rows)
    every = np.concatenate([np.zeros(0), *losses])
    trained = every[~np.isnan(every)]
    loss = float(trained.mean()) if len(trained) else math.nan
    if arguments.json:
        found = iter(losses)
        answer = {"run": str(tuned.folder.path), "step": tuned.step, "loss": finite(loss), "tokens": len(trained)}
        answer |= {"sequences": window.total}
        if window.packed is None:
            answer["samples"] = [_as_json(sample, next(found)) for sample in window.samples]
        else:
            answer["packed"] = [
                {
                    "number": each.number,
                    "capacity": each.capacity,
                    "tokens": each.tokens,
                    "documents": [_as_json(document, next(found)) for document in each.documents],
                }
                for each in window.packed
            ]
        print(json.dumps(answer, ensure_ascii=False, allow_nan=False))
        return 0
    _print(window.samples, losses)
    of = pluralise(len(rows), "sequence")
    if len(trained):
        print(f"\nstep {tuned.step}: loss {loss:.4f} over {pluralise(len(trained), 'trained token')} of {of}")
    elif rows:
        print(f"\nstep {tuned.step}: no loss: none of the tokens of {of} is trained")
    else:
        print(f"step {tuned.step}: no loss: there is no sequence {arguments.offset or 0} or later")
    return 0


def _window(arguments: argparse.Namespace, tuned: TunedRun) -> _Window:
    """Returns the requested sequences."""
    from stoker.cli.output.tokenise_report import TokeniseReport
    from stoker.data.sample_preview import samples_from, sequences_from
    from stoker.evaluate.measure_run import corpus_of, source_like, tokenised_like

    base, codec = Path.cwd(), tuned.text.codec
    begin, count = arguments.offset or 0, arguments.by_token
    with TokeniseReport() as report:
        if arguments.data is not None:
            source = tokenised_like(tuned, source_like(tuned, arguments.data, arguments.format), base, report)
            return _Window(source.cache.rows, samples_from([source], codec, begin, count))
        corpus = corpus_of(tuned, base, report)
        corpus.read_whole()
    if arguments.packed:
        packed, total = sequences_from(corpus, codec, begin, count)
        return _Window(total, [document for each in packed for document in each.documents], packed)
    total = sum(source.cache.ready for source in corpus.sources)
    return _Window(total, samples_from(corpus.sources, codec, begin, count))


def _as_json(sample: SamplePreview, losses: np.ndarray) -> dict[str, Any]:
    return {**asdict(sample), "loss": [finite(value) for value in losses.tolist()]}


def _print(samples: Sequence[SamplePreview], losses: Sequence[np.ndarray]) -> None:
    """Prints the sequences; each token on the colour of its loss on a terminal, followed by its loss in a pipe."""
    from rich.text import Text

    from stoker.cli.output.rollout_view import largest, style
    from stoker.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    most = max((largest(values) for values in losses), default=0.0)
    if console.is_terminal:
        console.print(Text(f"coloured by loss: strongest at {most:.3g} nats", "dim"))
    for sample, values in zip(samples, losses, strict=True):
        pairs = list(zip(sample.tokens, values.tolist(), strict=True))
        trained = [value for _, value in pairs if not math.isnan(value)]
        mean = f", loss {sum(trained) / len(trained):.4f}" if trained else ""
        print(
            f"\n--- {sample.source}:{sample.row}: {pluralise(len(sample.ids), 'token')}, {len(trained):,} trained{mean}"
        )
        if console.is_terminal:
            parts = ((escape_control_characters(token), style(value, most, signed=False)) for token, value in pairs)
            console.print(Text.assemble(*parts))
        else:
            figures = (f"{OPEN}{value:.2f}{CLOSE}" if not math.isnan(value) else "" for _, value in pairs)
            print(
                "".join(
                    escape_control_characters(token) + figure for (token, _), figure in zip(pairs, figures, strict=True)
                )
            )
