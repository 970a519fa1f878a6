"""``stoker eval RUN --against OTHER``: two runs on the same rows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.cli.eval.answers import AnswerProgress, judge_notes, model_of, questions_of, settings_of
from stoker.cli.eval.report import finish
from stoker.cli.options.run_options import trusted
from stoker.errors import UserError
from stoker.evaluate.compare_models import Compared, answer_against, compare_answers, compare_losses, figure_of
from stoker.evaluate.intervals import FEWEST
from stoker.evaluate.scored_answers import answer, details, mean_figures
from stoker.generate.open_model import open_model
from stoker.runs.evaluations import Figure, KeptEvaluation
from stoker.runs.find_run import find_run

if TYPE_CHECKING:
    from stoker.checkpoint.load_run import TunedRun

SHOWN = 60  # characters of a prompt or an answer in the list of rows


def run_against(arguments: argparse.Namespace) -> int:
    """Compares answers if rows with expected answers are given, else losses."""
    return _answers(arguments) if arguments.answers is not None else _losses(arguments)


def _answers(arguments: argparse.Namespace) -> int:
    questions = questions_of(arguments).of_two_models()
    settings = settings_of(arguments)
    model = model_of(arguments)
    ours = answer(model, questions, settings, finished=AnswerProgress(questions, f"{model.name}: "))
    other = open_model(arguments.against, Path.cwd(), at=arguments.against_at, trusted=trusted(arguments))
    ours, theirs = answer_against(ours, other, questions, settings, AnswerProgress(questions, f"{arguments.against}: "))
    names = list(questions.scorers)
    mine, their = _names(model.name, other.name, arguments)
    labels = _labels((mine, model.step), (their, other.step), arguments.against)
    compared = compare_answers(ours, theirs, names, seed=arguments.seed)
    against = f"less {labels[1]}"
    found = KeptEvaluation(
        kind="against",
        time=time.time(),
        model=mine,
        step=model.step,
        data=questions.as_json(),
        asked={"score": list(questions.chosen), **_asked(arguments), **settings.as_json()},
        figures=(
            *mean_figures(ours, names, of=labels[0]),
            *mean_figures(theirs, names, of=labels[1]),
            *(figure_of(each.difference, against, each.name) for each in compared),
        ),
        details=details(ours, questions) | {each.name: each.as_json() for each in compared},
    )
    rows = [a.as_json() | {"against": b.as_json()} for a, b in zip(ours, theirs, strict=True)]
    notes = _notes(compared, labels[0])
    notes += [f"{name}: compares the two answers to each row" for name in sorted(questions.between)]
    notes += judge_notes(found.details)
    for each in compared:
        for number in each.rows:
            a, b = ours[number], theirs[number]
            scores = f"{a.scores[each.name].value:.2f} and {b.scores[each.name].value:.2f}"
            notes.append(f"{a.row.source}:{a.row.row}  {each.name} {scores}: {_short(a.text)} | {_short(b.text)}")
    return finish(arguments, found, rows, notes)


def _losses(arguments: argparse.Namespace) -> int:
    from stoker.checkpoint.load_run import open_run
    from stoker.cli.output.tokenise_report import TokeniseReport
    from stoker.evaluate.row_losses import paired, row_losses, rows_of, units_of

    base = Path.cwd()
    first = open_run(arguments.run, base, at=arguments.at, trusted=trusted(arguments))
    second = open_run(arguments.against, base, at=arguments.against_at, trusted=trusted(arguments))
    with TokeniseReport() as report:
        rows = rows_of(first, arguments.data, arguments.format, base, report)
        if arguments.data is not None:
            others = rows_of(second, arguments.data, arguments.format, base, report)
        elif _templates(first, base) == _templates(second, base):
            others = rows
        else:
            raise UserError(
                "the two runs have different tokenizers or templates, so what one held out is not in the other's "
                "tokens: name data to evaluate on"
            )
    ours, theirs, alone = paired(row_losses(first, rows), row_losses(second, others))
    if not ours:
        raise UserError("the two runs have no row in common: every row is dropped for one of them")
    unit, units = units_of(ours, theirs)
    found = compare_losses([r.loss for r in ours], [r.loss for r in theirs], units, seed=arguments.seed)
    mine, their = _names(first.folder.path.name, second.folder.path.name, arguments)
    names = _labels((mine, first.step), (their, second.step), arguments.against)
    total = sum(units)
    name = f"loss a {unit}"
    means = [sum(r.loss for r in each) / total for each in (ours, theirs)]
    result = KeptEvaluation(
        kind="against",
        time=time.time(),
        model=mine,
        step=first.step,
        data=_data(arguments, len(ours)),
        asked={**_asked(arguments), "seed": arguments.seed},
        figures=(
            *(Figure(of, name, mean, rows=len(ours)) for of, mean in zip(names, means, strict=True)),
            figure_of(found.difference, f"less {names[1]}", name),
        ),
        details={"loss": found.as_json(), "unit": unit, "rows_of_one_only": alone},
    )
    kept = [
        {"source": a.source, "row": a.row, "loss": a.loss, "against": b.loss, "unit": size}
        for a, b, size in zip(ours, theirs, units, strict=True)
    ]
    notes = _notes([found], names[0])
    notes += [f"{alone} rows are excluded: only one of the runs uses them"] if alone else []
    for number in found.rows:
        a, b, size = ours[number], theirs[number], units[number]
        notes.append(f"{a.source}:{a.row}  loss {a.loss / size:.4f} and {b.loss / size:.4f}")
    return finish(arguments, result, kept, notes)


def _templates(tuned: TunedRun, base: Path) -> set[str]:
    """Returns digests of a run's tokenizer with the template of each of its sources."""
    return {tuned.text.codec.for_source(source, base).fingerprint for source in tuned.job.data}


def _data(arguments: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Returns the record of the rows that losses are compared on."""
    if arguments.data is None:
        return {"path": "held out", "fingerprint": None, "rows": rows}
    from stoker.data.sources import open_source
    from stoker.job.blocks.source_block import SourceBlock

    source = open_source(SourceBlock(path=arguments.data), Path.cwd())
    return {"path": arguments.data, "fingerprint": source.fingerprint(), "rows": rows}


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"against": arguments.against, "against_at": arguments.against_at}


def _names(first: str, second: str, arguments: argparse.Namespace) -> tuple[str, str]:
    """Returns names of two models; equal ones, as of a stage in two runs, get the folders that tell them apart."""
    ours, theirs = (_folder(name).parts[1:] for name in (arguments.run, arguments.against))
    if first != second or ours == theirs:
        return first, second
    differing = next(n for n in range(1, 1 + max(len(ours), len(theirs))) if ours[-n:] != theirs[-n:])
    return "/".join(ours[-differing:]), "/".join(theirs[-differing:])


def _folder(name: str) -> Path:
    with suppress(UserError):
        return find_run(name, Path.cwd()).path.resolve()
    return Path(name).resolve()


def _labels(first: tuple[str, int | None], second: tuple[str, int | None], path: str) -> tuple[str, str]:
    """Returns labels of two models; equal names get their steps, or the path of the second."""
    if first[0] != second[0]:
        return first[0], second[0]
    if first[1] == second[1]:
        return first[0], path
    return f"{first[0]} step {first[1]}", f"{second[0]} step {second[1]}"


def _notes(compared: Sequence[Compared], name: str) -> list[str]:
    lines = []
    for each in compared:
        found = each.difference
        why = "the interval contains 0" if found.rows >= FEWEST else f"there are fewer than {FEWEST} rows"
        verdict = "" if found.excludes_zero else f"; {why}, so the difference is not significant"
        counts = f"{name} wins {found.wins} rows, loses {found.losses}, ties {found.ties}"
        lines.append(f"{each.name}: {counts}{verdict}")
    return lines


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= SHOWN else f"{plain[:SHOWN]} ..."
