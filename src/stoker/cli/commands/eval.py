"""Evaluate a run: loss, perplexity and token accuracy over the trained tokens; or score its answers against expected
answers, against another run, under several prompt templates, or on tasks of lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stoker.cli.commands.export import QUANTISED
from stoker.cli.eval.tokens import add_by_token, check_by_token
from stoker.cli.options.run_options import add_at, add_trust, trusted
from stoker.cli.preflight_names import require_run, require_run_or_model
from stoker.errors import Problem, UserError
from stoker.scoring.scorer import SCORERS

LONGEST_ANSWER = 256  # tokens
OF_LANGUAGE_MODELS = ("answers", "tasks", "against", "compare", "quantise")  # options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker eval``."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run's folder, or its name below runs/; with --answers, --prompts and --tasks also an exported folder, "
        "a GGUF file or a hub id",
    )
    parser.add_argument(
        "data",
        nargs="?",
        metavar="DATA",
        help="file, folder, hub id or catalogue name (default: the held-out rows of the run)",
    )
    parser.add_argument("--format", default="auto", help="format of DATA (default: detected from its rows)")
    add_at(parser)
    parser.add_argument("--compare", action="store_true", help="also evaluate the untuned model")
    parser.add_argument(
        "--quantise", choices=QUANTISED, help="also evaluate the merged model in 8 or 4 bits, int8 or int4"
    )
    add_by_token(parser)
    _add_answers(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust(parser)


def _add_answers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation of answers")
    group.add_argument("--answers", metavar="FILE", help="rows of prompts and expected answers")
    group.add_argument(
        "--score",
        nargs="+",
        action="extend",
        metavar="NAME[:ARG]",
        help=f"scorers: {', '.join(SCORERS)} (default: exact normalised)",
    )
    group.add_argument(
        "--tasks",
        nargs="+",
        action="extend",
        metavar="TASK",
        help="tasks of lm-evaluation-harness: names, YAML files, or the offline tasks offline/mmlu-dev, "
        "offline/humaneval, offline/sotu and offline/arithmetic",
    )
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="YAML or JSON file of named prompt templates with {columns}, compared on --answers",
    )
    group.add_argument(
        "--best",
        metavar="FILE",
        help="file for the best template of --prompts (default: best_prompt.jinja in the folder of the results)",
    )
    group.add_argument(
        "--against", metavar="RUN", help="another run to compare with, by loss on DATA or by scores on --answers"
    )
    group.add_argument(
        "--against-at",
        default="last",
        metavar="CHECKPOINT",
        help="checkpoint of --against: last (default), best, or a step",
    )
    group.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompts of --tasks")
    group.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N rows, or N rows of each task")
    group.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 (default) is greedy decoding"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="random seed for sampling and for bootstrap resampling (default: 0)"
    )
    group.add_argument(
        "--max-tokens", type=int, default=LONGEST_ANSWER, help="maximum length of an answer in tokens (default: 256)"
    )
    group.add_argument(
        "--to",
        metavar="FOLDER",
        help="folder for the results (default: the run's folder; for a model, results are only printed)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluates and prints."""
    _check_options(arguments)
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    require = require_run if arguments.answers is None and arguments.tasks is None else require_run_or_model
    for name in filter(None, (arguments.run, arguments.against)):
        require(name, Path.cwd())
    _check_language_models(arguments, Path.cwd())
    if (arguments.answers, arguments.against, arguments.tasks) != (None, None, None):
        from stoker.cli.eval.report import check_place

        check_place(arguments)
    if arguments.prompts is not None:
        from stoker.cli.eval.prompts import run_prompts

        return run_prompts(arguments)
    if arguments.against is not None:
        from stoker.cli.eval.against import run_against

        if arguments.data is not None:
            _check(arguments, Path.cwd())
        return run_against(arguments)
    if arguments.answers is not None:
        from stoker.cli.eval.answers import run_answers

        return run_answers(arguments)
    if arguments.tasks is not None:
        from stoker.cli.eval.tasks import run_task_list

        return run_task_list(arguments)
    if arguments.by_token is not None:
        from stoker.cli.eval.tokens import run_by_token

        if arguments.data is not None:
            _check(arguments, Path.cwd())
        return run_by_token(arguments)
    return _run_loss(arguments)


def _check_options(arguments: argparse.Namespace) -> None:
    """Rejects options that have no effect together, before anything is loaded."""
    check_by_token(arguments)
    _check_numbers(arguments)
    answers, tasks = arguments.answers is not None, arguments.tasks is not None
    mode = "--answers" if answers else "--tasks"
    if answers and tasks:
        raise UserError("--answers and --tasks are separate evaluations; run one after the other")
    if (answers or tasks) and (arguments.data is not None or arguments.format != "auto"):
        raise UserError(Problem(f"DATA and --format measure a loss, {mode} answers", "give one of them"))
    if (answers or tasks) and (arguments.compare or arguments.quantise):
        raise UserError(f"--compare and --quantise measure a loss; {mode} takes neither")
    if not answers and arguments.score is not None:
        raise UserError(Problem("--score scores answers", "give rows with --answers FILE"))
    if not tasks and arguments.chat:
        raise UserError("--chat is an option of --tasks; --answers always uses the template of the training")
    if arguments.prompts is not None and (not answers or arguments.against is not None):
        raise UserError(Problem("--prompts compares templates over rows", "give --answers FILE, and no --against"))
    if arguments.best is not None and arguments.prompts is None:
        raise UserError("--best writes the best template of --prompts FILE")
    if arguments.against is None and arguments.against_at != "last":
        raise UserError("--against-at is a checkpoint of --against RUN")
    if arguments.against is not None and tasks:
        raise UserError("--against compares rows: give it DATA or --answers; run --tasks on each of the two")
    if arguments.against is not None and (arguments.compare or arguments.quantise):
        raise UserError("--against takes neither --compare nor --quantise")
    if not answers and not tasks:
        _check_loss_options(arguments)


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name, number in (("--max-tokens", arguments.max_tokens), ("--limit", arguments.limit)):
        if number is not None and number < 1:
            raise UserError(f"{name} must be above 0")
    if arguments.temperature < 0:
        raise UserError("--temperature must be at least 0")


def _check_loss_options(arguments: argparse.Namespace) -> None:
    """Rejects options without effect on a loss."""
    if arguments.temperature != 0 or arguments.max_tokens != LONGEST_ANSWER:
        raise UserError("--temperature and --max-tokens have no effect on a loss")
    options = {"--limit": arguments.limit, "--to": None if arguments.against else arguments.to}
    if given := [name for name, value in options.items() if value is not None]:
        raise UserError(Problem(f"{given[0]} has no effect on a loss", "give --answers FILE or --tasks NAME"))


def _check_language_models(arguments: argparse.Namespace, base: Path) -> None:
    """Rejects options for language models if a run is of a task that has its own metrics."""
    given = [name for name in OF_LANGUAGE_MODELS if getattr(arguments, name)]
    if not given:
        return
    from stoker.job.load_job import load_job
    from stoker.job.task_spec import task_of
    from stoker.models.model_source import find_model
    from stoker.runs.find_run import find_run

    for name in filter(None, (arguments.run, arguments.against)):
        if find_model(name, base, or_run=True) is not None:
            continue
        task = task_of(load_job(find_run(name, base).job).job)
        if task.ranks:
            message = f"--{given[0]} is for language models, and {name} is a run of task {task.name}"
            raise UserError(Problem(message, "measure it with `stoker eval RUN [DATA]` alone"))


def _run_ranking(arguments: argparse.Namespace) -> int | None:
    """Evaluates a run of a ranking model; returns None for other tasks."""
    from stoker.job.load_job import load_job
    from stoker.job.task_spec import task_of
    from stoker.runs.find_run import find_run

    base = Path.cwd()
    if not task_of(load_job(find_run(arguments.run, base).job).job).ranks:
        return None
    from stoker.train.ranking.open_run import measure_run

    found = measure_run(
        arguments.run, arguments.data, arguments.format, at=arguments.at, trusted=trusted(arguments), base=base
    )
    if arguments.json:
        print(json.dumps(found.as_json()))
    else:
        from stoker.cli.eval.ranking import print_ranking

        print_ranking(found)
    return 0


def _run_loss(arguments: argparse.Namespace) -> int:
    from stoker.checkpoint.load_run import open_run
    from stoker.cli.output.tokenise_report import TokeniseReport
    from stoker.evaluate.measure_run import measure
    from stoker.evaluate.trained_files import trained_files, trained_note

    base = Path.cwd()
    if arguments.data is not None:
        _check(arguments, base)
    if (code := _run_ranking(arguments)) is not None:
        return code
    tuned = open_run(arguments.run, base, at=arguments.at, trusted=trusted(arguments))
    with TokeniseReport() as report:
        results = measure(
            tuned,
            arguments.data,
            arguments.format,
            base,
            compare=arguments.compare,
            quantise=arguments.quantise,
            report=report,
        )
    trained = trained_files(arguments.run, arguments.data, base)
    if arguments.json:
        of_all = {"step": tuned.step} | ({"trained_files": trained} if trained else {})
        several = arguments.compare or arguments.quantise
        values = {name: result.as_json() for name, result in results.items()} if several else results["tuned"].as_json()
        print(json.dumps(values | of_all))
        return 0
    for name, result in results.items():
        label = f"step {tuned.step}" if name == "tuned" else name
        found = result.evaluation
        numbers = [f"loss {found.loss:.4f}"]
        numbers += [f"perplexity {found.perplexity:.2f}"] if found.perplexity is not None else []
        numbers += [f"{found.target} accuracy {found.accuracy:.1%}"] if found.accuracy is not None else []
        numbers += [f"{result.bits_per_byte:.4f} bits per byte"] if result.bits_per_byte is not None else []
        rows = f"{result.rows_used} rows; {result.rows_dropped} dropped"
        print(f"{label:<10} {'  '.join(numbers)}  ({found.targets:,} trained {found.target}s of {rows})")
    for note in trained_note(trained):
        print(note)
    return 0


def _check(arguments: argparse.Namespace, base: Path) -> None:
    from stoker.data.sources import source_problem
    from stoker.job.blocks.source_block import SourceBlock
    from stoker.job.keys.annotations import choices

    formats = choices(SourceBlock.model_fields["format"].annotation)
    if arguments.format not in formats:
        raise UserError(f"--format {arguments.format}: there is no such format; write one of {', '.join(formats)}")
    problem = source_problem(SourceBlock(path=arguments.data, format=arguments.format), base)
    if problem:
        raise UserError("; ".join(problem))
