"""Share of a text in a language, by py3langid (Lui and Baldwin, 2012), which needs no network."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import regex

from stoker.errors import Problem, UserError
from stoker.scoring.scorer import Score, Scorer, require_package

_SENTENCES = regex.compile(r"[^.!?\u2026\u3002\uff01\uff1f\n]+")
_LETTERS = regex.compile(r"\p{L}")


def language_scorer(name: str, argument: str, base: Path) -> Scorer:
    """Returns the scorer ``language:CODE``.

    Raises:
        UserError: the package is missing, or it does not know the language.
    """
    require_package("py3langid", name)
    check_language(name, argument, base)
    return Scorer(name, lambda answer, row: Score(language_share(answer, argument)))


def check_language(name: str, argument: str, base: Path) -> None:
    """Raises UserError if the language of ``language:CODE`` is unknown; the package knows, if it is installed."""
    if importlib.util.find_spec("py3langid") is None:
        return
    known = languages()
    if argument not in known:
        near = get_close_matches(argument.lower(), known, 1, 0.5)
        hint = f"did you mean language:{near[0]}?" if near else f"take one of {', '.join(known)}"
        raise UserError(Problem(f"the scorer {name!r} has an unknown language code", hint))


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def languages() -> tuple[str, ...]:
    """Returns the codes of the known languages, from ISO 639-1 if there is one."""
    return tuple(sorted(map(str, _identifier().labels)))


def language_share(text: str, code: str) -> float:
    """Returns the share of a text's letters that are in sentences of a language; 0 for a text without letters."""
    letters = {True: 0, False: 0}
    for sentence, count in _sentences(text):
        letters[str(_identifier().classify(sentence)[0]) == code] += count
    return letters[True] / max(1, sum(letters.values()))


def _sentences(text: str) -> Iterator[tuple[str, int]]:
    """Yields the sentences that have letters, with their number."""
    for sentence in _SENTENCES.findall(text):
        if count := len(_LETTERS.findall(sentence)):
            yield sentence.strip(), count
