"""Row formats of a conversation; their columns are in `stoker.data.formats.all_formats`."""

from __future__ import annotations

from stoker.data.files.rows import Conversation, Message, Text
from stoker.data.formats.format_spec import Format
from stoker.data.formats.messages import SHAREGPT, Refused, parse_turns, parsed, text_of, until_last_answer
from stoker.data.formats.named_columns import NamedColumns
from stoker.data.formats.shared_prompt import conversation_of


def _instruction(row: NamedColumns) -> Conversation:
    turns = row.system()
    history = parsed(row.get("history")) or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Refused("history is not a list of [question, answer]")
    for question, answer in history:
        turns += parse_turns(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], "history"
        )
    turns += question_with_input(row, "instruction") + row.turn(row.need("output"), "output", "assistant")
    return Conversation(until_last_answer(turns, may_lack_answer=row.prompts))


def question_with_input(row: NamedColumns, ours: str) -> list[Message]:
    """Returns a question and its input as one turn."""
    question = row.need(ours)
    parts = [part for part in ("" if question is None else text_of(question), row.text("input")) if part.strip()]
    if not parts:
        raise Refused(f"empty {ours}")
    return parse_turns([{"role": "user", "content": "\n\n".join(parts)}], row.name(ours))


def _messages(row: NamedColumns) -> Conversation:
    return _conversation(row, row.listed_turns("messages"))


def _sharegpt(row: NamedColumns) -> Conversation:
    turns = row.listed_turns("conversations", SHAREGPT)
    return _conversation(row, row.system() + turns)


def _prompt(row: NamedColumns) -> Conversation:
    prompt, answer = row.turns("prompt", "user"), row.turns("completion", "assistant")
    return _conversation(row, conversation_of(prompt, answer, row.name("completion")))


def _question(row: NamedColumns) -> Conversation:
    return _conversation(row, row.system() + row.turns("prompt", "user"), may_lack_answer=True)


def _conversation(row: NamedColumns, turns: list[Message], *, may_lack_answer: bool = False) -> Conversation:
    kept = until_last_answer(turns, may_lack_answer=may_lack_answer or row.prompts)
    return Conversation(kept, row.tools(), after=max(0, len(turns) - len(kept)))


def _text(row: NamedColumns) -> Text:
    value = row.need("text")
    text = "" if value is None else text_of(value)
    if not text.strip():
        raise Refused("empty text")
    return Text(text)


# In order of precedence, for rows that fit several.
CONVERSATIONS = {
    "messages": Format(_messages, ("messages",), {"messages": ("conversations", "conversation")}),
    "sharegpt": Format(_sharegpt, ("conversations",), {"conversations": ("conversation", "messages")}),
    "instruction": Format(
        _instruction,
        ("instruction", "output"),
        {"instruction": ("question", "query", "prompt"), "input": ("context",), "output": ("response", "answer")},
    ),
    "prompt": Format(_prompt, ("prompt", "completion")),
}
QUESTION = Format(_question, ("prompt",), {"prompt": ("question", "query", "problem")})
TEXT = Format(_text, ("text",), {"text": ("content", "document")})
