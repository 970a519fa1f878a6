"""``stoker eval --prompts``: several prompt templates over the same rows."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from stoker.cli.eval.answers import AnswerProgress, judge_notes, model_of, notes, questions_of, settings_of
from stoker.cli.eval.report import finish, place_of_results
from stoker.errors import DiskFailed, Problem, UserError
from stoker.evaluate.ask_model import prompts_of
from stoker.evaluate.compare_models import figure_of
from stoker.evaluate.compare_prompts import TemplateRanking, rank
from stoker.evaluate.intervals import FEWEST
from stoker.evaluate.prompt_templates import as_chat_template, read_templates
from stoker.evaluate.scored_answers import ScoredAnswer, answer, details, mean_figures
from stoker.files import replace_file
from stoker.runs.evaluations import Figure, KeptEvaluation
from stoker.runs.json_lines import disk_errors


def run_prompts(arguments: argparse.Namespace) -> int:
    """Answers every row with every template, ranks the templates, and writes the best one."""
    base = Path.cwd()
    templates = read_templates(arguments.prompts, base)
    questions = questions_of(arguments)
    filled = {each.name: [each.fill(row) for row in questions.rows.rows] for each in templates}
    if arguments.best is not None and (base / arguments.best).is_symlink():
        raise UserError(Problem(f"--best {arguments.best} is a link", "name a file"))
    model = model_of(arguments)
    for turns in filled.values():  # an unusable prompt is an error before generation starts
        prompts_of(model, questions.rows.rows, turns)
    settings = settings_of(arguments)
    answers: dict[str, list[ScoredAnswer]] = {}
    for name, turns in filled.items():
        answers[name] = answer(model, questions, settings, turns, AnswerProgress(questions, f"{name}: "))
    names = list(questions.scorers)
    found = [r for r in (rank(answers, scorer, seed=arguments.seed) for scorer in names) if r is not None]
    lines = [_verdict(ranking) for ranking in found]
    best = found[0].best if found else None
    written = None
    if best is not None:
        place = place_of_results(arguments, base)
        path = base / arguments.best if arguments.best else place / "best_prompt.jinja" if place else None
        if path is not None:
            chat_template = as_chat_template(next(each for each in templates if each.name == best), model)
            try:
                with disk_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(path, chat_template)
                written = str(path)
                lines.append(f"{best} is written to {path}, for a job's data[].template")
            except DiskFailed as error:  # the figures are still to be printed
                lines.append(f"{best} is not written: {error}")
    result = KeptEvaluation(
        kind="prompts",
        time=time.time(),
        model=model.name,
        step=model.step,
        data=questions.as_json(),
        asked={
            "templates": {each.name: {"system": each.system, "user": each.user} for each in templates},
            "score": list(questions.chosen),
            **settings.as_json(),
        },
        figures=(
            *(figure for name, scored in answers.items() for figure in mean_figures(scored, names, of=name)),
            *(figure for ranking in found for figure in _differences(ranking)),
        ),
        details={
            "best": best,
            "written": written,
            "templates": {name: details(scored, questions) for name, scored in answers.items()},
        },
    )
    rows = [{"template": name} | each.as_json() for name, scored in answers.items() for each in scored]
    judged = [note for name, each in result.details["templates"].items() for note in judge_notes(each, f"{name}: ")]
    return finish(arguments, result, rows, [*notes(next(iter(answers.values())), questions), *judged, *lines])


def _differences(ranking: TemplateRanking) -> list[Figure]:
    first = ranking.order[0]
    return [figure_of(each, f"{first} less {name}", ranking.scorer) for name, each in ranking.behind.items()]


def _verdict(ranking: TemplateRanking) -> str:
    if ranking.best is not None:
        return f"{ranking.scorer}: {ranking.best} is the best; its interval is above 0 against every other"
    rows = next(iter(ranking.behind.values())).rows
    if rows < FEWEST:
        return f"{ranking.scorer}: no template is named the best of {rows} rows; give {FEWEST} or more"
    return f"{ranking.scorer}: no template is significantly the best; {ranking.order[0]} has the highest mean"
