"""Separates a prompt from its answers, which may be whole conversations that repeat it."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.data.files.rows import Message
from stoker.data.formats.messages import Refused


def conversation_of(prompt: Sequence[Message], answer: Sequence[Message], name: str) -> list[Message]:
    """Returns the answer if it repeats the prompt, else the prompt followed by the answer.

    Args:
        name: the answer's column.

    Raises:
        Refused: the answer begins with another turn than the assistant's, and does not repeat the prompt.
    """
    if _holds(answer, prompt):
        lacks_system = _has_system(prompt) and not _has_system(answer)
        return [*prompt[:lacks_system], *answer]
    if answer and answer[0].role != "assistant":
        raise Refused(f"{name} has turns before its answer other than the prompt")
    return [*prompt, *answer]


def split_prompt(
    prompt: Sequence[Message], conversations: Sequence[Sequence[Message]], names: str
) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    """Returns the first turns that all conversations share, and each one's further turns, at least its last.

    Args:
        prompt: the turns of the prompt's column; empty without one.
        names: the columns of the answers.

    Raises:
        Refused: the shared turns lack the prompt, or a turn of another role than the assistant's follows them.
    """
    first, shortest = conversations[0], min(map(len, conversations))
    shared = 0
    while shared < shortest - 1 and all(_same(first[shared], turns[shared]) for turns in conversations):
        shared += 1
    answers = tuple(tuple(turns[shared:]) for turns in conversations)
    if any(turns[0].role != "assistant" for turns in answers) or not _holds(first[:shared], prompt):
        raise Refused(f"{names} have different turns before their answers")
    return tuple(first[:shared]), answers


def _holds(turns: Sequence[Message], prompt: Sequence[Message]) -> bool:
    """Returns whether the prompt's turns are the first of ``turns``, or the last question among them.

    A system message that only one of them has does not count.
    """
    if len({turn.content.strip() for turn in (*turns[:1], *prompt[:1]) if turn.role == "system"}) > 1:
        return False
    asked, held = (
        [(turn.role, turn.content.strip()) for turn in messages if turn.role != "system"]
        for messages in (prompt, turns)
    )
    return asked == held[: len(asked)] or asked == [turn for turn in held if turn[0] == "user"][-1:]


def _has_system(turns: Sequence[Message]) -> bool:
    return bool(turns) and turns[0].role == "system"


def _same(one: Message, other: Message) -> bool:
    return (one.role, one.content.strip(), one.extra) == (other.role, other.content.strip(), other.extra)
