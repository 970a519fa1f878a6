"""Scores of an answer, from 0 (wrong) to 1 (right), by name.

| name | the answer is right where |
| --- | --- |
| exact | it is the expected text, white space around it aside |
| normalised | it is, without case, punctuation, articles and runs of white space (as SQuAD measures) |
| regex[:PATTERN] | the pattern is found in it; without PATTERN the expected text is the pattern |
| json_schema[:FILE] | it is JSON that fits the schema; without FILE the expected value is the schema |
| numeric[:TOLERANCE] | its last number is the expected one, within 0.5 or 1% |
| rouge[:rouge1, rouge2 or rougeL] | the F measure of n-grams or of the longest common subsequence (default rougeL) |
| chrf | the F measure of character n-grams |
| code[:SECONDS] | its program passes the unit tests of the row's column `tests`, in a sandbox |
| language:CODE | the share of it that is in a language, such as en |
| python:MODULE:FUNCTION | a function of yours gives the score |
| judge:URL[,MODEL] | a model behind an OpenAI-compatible address prefers it to the expected answer |

Where several expected answers are given, the best score counts.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stoker.errors import Problem, UserError, did_you_mean, placed_errors
from stoker.scoring.answer_rows import AnswerRow
from stoker.scoring.json_schema import check_schema_file, json_schema_scorer
from stoker.scoring.judge import Judge, check_judge, open_judge
from stoker.scoring.language import check_language, language_scorer
from stoker.scoring.patterns import compiled, is_found
from stoker.scoring.program_tests import check_time_limit, code_scorer
from stoker.scoring.python_scorer import check_function, python_scorer
from stoker.scoring.scorer import Score, Scorer, require_package
from stoker.scoring.unicode_words import UnicodeWords

ROUGES = ("rouge1", "rouge2", "rougeL")
SANDBOXED = ("code",)  # run programs, but in the sandbox
FOREIGN = ("python", "judge", *SANDBOXED)  # only the command line may name these
UNTRIED = ("python", "judge")  # not tried before real answers exist

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# U+2212 is a minus as the hyphen is. After a letter or digit both join, and a point continues a version or a date.
_NUMBER = re.compile(
    r"(?:(?<!\w)[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|(?<!\d)\.\d+)(?:[eE][-+\u2212]?\d+)?"
)


def scorer_of(name: str, base: Path) -> Scorer:
    """Returns the scorer of a name such as ``numeric:0.01``.

    Raises:
        UserError: the scorer does not exist, its argument is wrong, or a package that it needs is not installed.
    """
    kind, argument = _parts(name)
    return MAKERS[kind](name, argument, base)


def scorer_problem(name: str, base: Path) -> Problem | None:
    """Returns why there is no scorer of a name; None if no reason is seen.

    The user's code is not imported, no server is contacted, and no package needs to be installed.
    """
    try:
        kind, argument = _parts(name)
        CHECKS.get(kind, MAKERS[kind])(name, argument, base)
    except UserError as error:
        return error.problems[0]
    return None


def _parts(name: str) -> tuple[str, str]:
    """Returns kind and argument of a scorer's name. Raises UserError if there is no such kind."""
    kind, colon, argument = name.partition(":")
    if kind not in MAKERS:
        hint = did_you_mean(kind, MAKERS) or f"take one of {', '.join(MAKERS)}"
        raise UserError(Problem(f"there is no scorer {kind!r}", hint))
    if colon and not argument:
        raise UserError(Problem(f"the scorer {name!r} ends in a colon", f"write {kind}, or {kind}:ARGUMENT"))
    return kind, argument


def is_foreign(name: str, *, sandboxed: bool = True) -> bool:
    """Returns whether the scorer of a name runs code or contacts a server.

    Args:
        sandboxed: whether code in the sandbox counts.
    """
    kind = name.partition(":")[0]
    return kind in FOREIGN and (sandboxed or kind not in SANDBOXED)


def normalised(text: str) -> str:
    """Returns lower case without punctuation, articles and runs of white space (Rajpurkar et al., 2016, their
    script); punctuation is that of every script (as in MLQA; Lewis et al., 2020).
    """
    return " ".join(_ARTICLES.sub(" ", _plain(text)).split())


def _plain(text: str) -> str:
    return "".join(character for character in text.lower() if not _is_punctuation(character))


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def same_normalised(answer: str, expected: str) -> bool:
    """Compares normalised texts. Where nothing would be left of the expected one, such as the choice "A", articles
    count; if it is punctuation alone, everything does.
    """
    for normalise in (normalised, lambda text: " ".join(_plain(text).split())):
        if wanted := normalise(expected):
            return normalise(answer) == wanted
    return answer.strip() == expected.strip()


def last_number(text: str) -> float | None:
    """Returns the last number in a text; thousands may be grouped by commas."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def _best(compare: Callable[[str, str], float], answer: str, row: AnswerRow) -> Score:
    return Score(max(compare(answer, accepted) for accepted in row.accepted))


def _without_argument(name: str, argument: str, base: Path) -> None:
    if argument:
        raise UserError(Problem(f"the scorer {name!r} takes no argument", f"write {name.partition(':')[0]}"))


def _exact(name: str, argument: str, base: Path) -> Scorer:
    _without_argument(name, argument, base)
    return Scorer(name, partial(_best, lambda answer, expected: float(answer.strip() == expected.strip())))


def _normalised(name: str, argument: str, base: Path) -> Scorer:
    _without_argument(name, argument, base)
    return Scorer(name, partial(_best, lambda answer, expected: float(same_normalised(answer, expected))))


def _regex(name: str, argument: str, base: Path) -> Scorer:
    stated = compiled(argument) if argument else None

    def score(answer: str, row: AnswerRow) -> Score:
        with placed_errors(row.placed):
            patterns = [stated] if stated else [compiled(pattern) for pattern in row.accepted]
            return Score(float(any(is_found(pattern, answer) for pattern in patterns)))

    return Scorer(name, score)


def _numeric(name: str, argument: str, base: Path) -> Scorer:
    relative = argument.endswith("%")
    try:
        tolerance = float(argument.removesuffix("%")) / (100 if relative else 1) if argument else 1e-9
    except ValueError:
        tolerance = -1.0
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise UserError(
            Problem(f"the tolerance {argument!r} must be a number, at least 0", "write numeric:0.01 or numeric:1%")
        )
    return Scorer(name, partial(_is_near, tolerance, relative or not argument))


def _is_near(tolerance: float, relative: bool, answer: str, row: AnswerRow) -> Score:
    said, scores = last_number(answer), []
    for accepted in row.accepted:
        expected = last_number(accepted)
        if expected is None:
            raise UserError(row.problem(f"the expected answer {accepted[:40]!r} contains no number"))
        if math.isinf(expected):  # every number would be within 1% of it
            raise UserError(row.problem(f"the expected answer {accepted[:40]!r} is beyond float64"))
        allowed = tolerance * abs(expected) if relative else tolerance
        # The last digit of a decimal tolerance is not a binary number: 0.4 is within 0.1 of 0.3.
        scores.append(float(said is not None and abs(said - expected) <= allowed * (1 + 1e-9)))
    return Score(max(scores))


def _rouge_measure(name: str, argument: str, base: Path) -> None:
    if argument and argument not in ROUGES:
        raise UserError(Problem(f"there is no measure {argument!r} of rouge", f"take one of {', '.join(ROUGES)}"))


def _rouge(name: str, argument: str, base: Path) -> Scorer:
    _rouge_measure(name, argument, base)
    require_package("rouge_score", name)
    from rouge_score.rouge_scorer import RougeScorer

    kind = argument or "rougeL"
    measure = RougeScorer([kind], tokenizer=UnicodeWords())
    return Scorer(name, partial(_best, lambda said, expected: float(measure.score(expected, said)[kind].fmeasure)))


def _chrf(name: str, argument: str, base: Path) -> Scorer:
    _without_argument(name, argument, base)
    require_package("sacrebleu", name)
    from sacrebleu.metrics import CHRF

    measure = CHRF()
    return Scorer(name, partial(_best, lambda said, expected: measure.sentence_score(said, [expected]).score / 100))


def _judge(name: str, argument: str, base: Path) -> Scorer:
    judge = open_judge(argument)
    return Scorer(name, partial(_judged, judge), judge=judge, waits=True)


def _judged(judge: Judge, answer: str, row: AnswerRow) -> Score:
    with placed_errors(row.placed):
        verdict = judge.compare(question_of(row), answer, row.accepted[0])
    return Score(verdict.score, verdict.name, counts=verdict.is_clear)


def question_of(row: AnswerRow) -> str:
    """Formats a row's conversation for judges."""
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in row.turns)


MAKERS: dict[str, Callable[[str, str, Path], Scorer]] = {
    "exact": _exact,
    "normalised": _normalised,
    "regex": _regex,
    "json_schema": json_schema_scorer,
    "numeric": _numeric,
    "rouge": _rouge,
    "chrf": _chrf,
    "code": code_scorer,
    "language": language_scorer,
    "python": python_scorer,
    "judge": _judge,
}
# The arguments of kinds that import packages or code, or contact a server.
CHECKS: dict[str, Callable[[str, str, Path], object]] = {
    "json_schema": check_schema_file,
    "rouge": _rouge_measure,
    "chrf": _without_argument,
    "code": check_time_limit,
    "language": check_language,
    "python": check_function,
    "judge": check_judge,
}


def scorers_of(rows: Sequence[AnswerRow], chosen: Sequence[str], base: Path) -> dict[str, Scorer]:
    """Returns the required scorers: those of the command line, and those that rows name.

    Raises:
        UserError: a row names a scorer that does not exist, or one that would run code or contact an address, which
            only the command line may name; the error has the row's place.
    """
    scorers = {name: scorer_of(name, base) for name in chosen}
    for row in rows:
        for name in row.scorers:
            if name in scorers:
                continue
            if is_foreign(name):
                hint = f"write --score {name} on the command line too, if you trust it"
                raise UserError(row.problem(f"the row asks for the scorer {name!r}", hint))
            if name.startswith("json_schema:"):
                raise UserError(row.problem("a row cannot name a file", "write the schema as the expected value"))
            with placed_errors(row.placed):
                scorers[name] = scorer_of(name, base)
    return scorers
