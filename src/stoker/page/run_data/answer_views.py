"""Evaluations, rollouts and rows in the page's form: one line per figure, texts split into tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stoker.evaluate.intervals import FEWEST
from stoker.page.run_data.metric_series import Numbers
from stoker.runs.evaluations import KeptEvaluation

LESS = "less "  # prefix of a difference's figures, before the other model's name; see `stoker eval --against`
LOWER = ("loss", "perplexity")  # metrics for which lower is better
MOST_STEPS = 200
TOKEN_VALUES = ("kl", "advantage", "value", "reward", "return", "old", "reference", "entropy", "sampled")


def evaluation_figures(kept: list[KeptEvaluation]) -> Iterator[dict[str, Any]]:
    """Yields the figures of evaluations, oldest first; ``subject`` is the run that a figure is of."""
    for each in kept:
        is_comparison = each.kind == "against"
        other = next((f.of.removeprefix(LESS) for f in each.figures if is_comparison and f.of.startswith(LESS)), None)
        for figure in each.figures:
            low, high = figure.low, figure.high
            is_apart = low is not None and high is not None and (low > 0 or high < 0)
            of = figure.of
            yield {
                "kind": each.kind,
                "of": "" if is_comparison else of,
                "subject": other if is_comparison and of == other else each.model,
                "metric": figure.name,
                "value": figure.value,
                "low": low,
                "high": high,
                "standard_error": figure.standard_error,
                "rows": figure.rows,
                "against": other if is_comparison and of.startswith(LESS) else None,
                "significant": is_apart and figure.rows >= FEWEST,
                "higher": not figure.name.startswith(LOWER),
                "run": each.model,
                "step": each.step,
                "time": each.time,
                "data": each.data.get("path"),
            }


def rollouts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the answers of `stoker rollouts --json`, each token with its text and figures."""
    return [
        {
            "prompt": each["prompt_text"],
            "text": each["answer_text"],
            "score": each["score"],
            "rewards": each["rewards"],
            "kl": each["kl"],
            "end": each["ended"],
            "source": each["source"],
            "row": each["row"],
            "tokens": list(_tokens(each)),
        }
        for each in answer.get("answers", [])
    ]


def _tokens(each: dict[str, Any]) -> Iterator[dict[str, Any]]:
    known = {name: values for name, values in each["tokens"].items() if name in TOKEN_VALUES}
    for index, (number, text) in enumerate(zip(each["ids"], each["texts"], strict=True)):
        yield {"id": number, "text": text} | {
            name: values[index] for name, values in known.items() if index < len(values)
        }


def sequences_of(packed: Any) -> list[dict[str, Any]]:
    """Packed sequences of `stoker data --packed`, each with its rows."""
    return [
        {key: each[key] for key in ("number", "capacity", "tokens")} | {"rows": rows_of(each["documents"])}
        for each in packed
    ]


def rows_of(samples: Any) -> list[dict[str, Any]]:
    """Sequences of `stoker data --json`, each with a token an object; a click log has none."""
    keep = ("source", "row", "verdict", "lost", "continues", "expected")
    return [
        {key: sample.get(key) for key in keep} | {"tokens": list(_row_tokens(sample))}
        for sample in samples or ()
        if isinstance(sample, dict) and "ids" in sample
    ]


def _row_tokens(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    names = {"id": "ids", "text": "tokens", "trained": "trained", "special": "special"}
    names |= {"loss": "loss"} if "loss" in sample else {}
    for values in zip(*(sample[name] for name in names.values()), strict=True):
        yield dict(zip(names, values, strict=True))


def chosen_steps(steps: Numbers) -> list[int]:
    """Returns the steps of a run to choose from: all of them, or some spread evenly, with the last."""
    whole = sorted({int(step) for step in steps[np.isfinite(steps)].tolist()})
    every = -(-len(whole) // MOST_STEPS) or 1
    return whole[::-1][::every][::-1]
