"""Terminal view of a policy's answers: each token on the colour of one of its values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.style import Style
from rich.text import Text
from tokenizers import Tokenizer

from stoker.console import Console
from stoker.train.rollouts.rollout import Rollout
from stoker.train.rollouts.step_rollouts import StepRollouts

SIGNED = ("advantage", "kl", "value", "reward", "return")  # green above 0, red below; other values are coloured by size
GREEN, RED, BLUE = (0, 150, 60), (200, 40, 40), (40, 90, 200)
FAINTEST = 0.05  # share of the largest value below which a token has no colour
FIGURES = ("score", "kl", "entropy", "response_tokens", "ended", "informative", "explained_variance")


def show(step: StepRollouts, chosen: Sequence[Rollout], tokenizer: Tokenizer, *, by: str, together: bool) -> None:
    """Prints answers.

    Args:
        by: the value that colours a token.
        together: whether answers to one prompt are grouped under it.
    """
    console = Console(soft_wrap=True, highlight=False)
    for iteration in step.iterations:
        figures = ", ".join(f"{n} {iteration.figures[n]:.3g}" for n in FIGURES if n in iteration.figures)
        console.print(Text(f"step {step.step}, answers sampled for step {iteration.step}: {figures}", "bold"))
    most = max((largest(r.token_values()[by]) for r in step.rollouts), default=0.0)
    console.print(Text(f"coloured by {by}: {_legend(by, most)}", "dim"))
    before: int | None = None
    for rollout in chosen:
        if not together or rollout.prompt != before:
            console.print()
            console.print(Text(f"prompt {rollout.prompt} ({rollout.source}:{rollout.row})", "bold"))
            prompt = tokenizer.decode(rollout.prompt_ids.tolist(), skip_special_tokens=False)
            console.print(Text(prompt.strip("\n"), "dim"))
        before = rollout.prompt
        console.print(Text(_about(rollout), "cyan"))
        console.print(_coloured(rollout, tokenizer, by, most))
    if left := len(step.rollouts) - len(chosen):
        console.print()
        console.print(f"{left} more; `--limit {len(step.rollouts)}` shows all")


def _about(rollout: Rollout) -> str:
    parts = [f"answer {rollout.sample}", f"score {rollout.score:.3g}"]
    parts += [f"{name} {value:.3g}" for name, value in rollout.rewards.items()]
    parts += [f"ended by {rollout.ended}", f"{rollout.length} tokens"]
    return ", ".join([*parts, *([f"KL {rollout.kl:.3g}"] if rollout.kl is not None else [])])


def _legend(by: str, most: float) -> str:
    signed = "green above 0, red below" if by in SIGNED else "blue"
    return f"{signed}, strongest at {most:.3g}"


def _coloured(rollout: Rollout, tokenizer: Tokenizer, by: str, most: float) -> Text:
    """Formats the answer; a character of several tokens has the colour of the last one."""
    text = Text()
    values = rollout.token_values()[by]
    for piece, value in zip(token_texts(tokenizer, rollout.answer_ids), values.tolist(), strict=True):
        text.append(piece, style(value, most, signed=by in SIGNED))
    return text


def style(value: float, most: float, *, signed: bool) -> Style:
    """Returns a background between white and the colour, with black text, readable on dark and light terminals."""
    share = abs(value) / most if most and np.isfinite(value) else 0.0
    if share < FAINTEST:
        return Style()
    colour = (GREEN if value > 0 else RED) if signed else BLUE
    strength = min(1.0, 0.15 + 0.6 * share)
    red, green, blue = (round(255 + (part - 255) * strength) for part in colour)
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")


def largest(values: np.ndarray) -> float:
    """Returns the largest magnitude of some values; those that are not finite are ignored."""
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max(initial=0.0))


def token_texts(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Returns the text that each token adds; a character of several tokens is at the last of them."""
    from stoker.generate.answer_text import AnswerText

    text = AnswerText(tokenizer, skip_special_tokens=False)
    pieces = [text.push(int(token)) for token in ids]
    if pieces:
        pieces[-1] += text.finish()
    return pieces
