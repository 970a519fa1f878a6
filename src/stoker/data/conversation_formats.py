"""Row formats of a conversation; their columns are in `stoker.data.formats`."""

from __future__ import annotations

from stoker.data.format_spec import Format
from stoker.data.messages import Refused, from_value_messages, parsed, role_messages, text_of, tools_of, trained
from stoker.data.named_columns import NamedColumns
from stoker.data.rows import Conversation, Message, Text


def _instruction(row: NamedColumns) -> Conversation:
    turns = row.system()
    history = parsed(row.get("history")) or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Refused("history is not a list of [question, answer]")
    for question, said in history:
        turns += role_messages(
            [{"role": "user", "content": question}, {"role": "assistant", "content": said}], "history"
        )
    question, answer = question_with_input(row, "instruction"), row.need("output")
    said = role_messages([{"role": "assistant", "content": answer}], row.name("output"), prompts=row.prompts)
    return Conversation(trained([*turns, *question, *said], prompts=row.prompts))


def _conversation(row: NamedColumns, turns: list[Message]) -> Conversation:
    kept = trained(turns, prompts=row.prompts)
    return Conversation(kept, tools_of(row.get("tools")), after=max(0, len(turns) - len(kept)))


def question_with_input(row: NamedColumns, ours: str) -> list[Message]:
    """Returns a question and its input as one turn."""
    question = row.need(ours)
    parts = [part for part in ("" if question is None else text_of(question), row.text("input")) if part.strip()]
    if not parts:
        raise Refused(f"empty {ours}")
    return role_messages([{"role": "user", "content": "\n\n".join(parts)}], row.name(ours))


def _messages(row: NamedColumns) -> Conversation:
    turns = role_messages(parsed(row.need("messages")), f"{row.name('messages')}[]", prompts=row.prompts)
    return _conversation(row, turns)


def _sharegpt(row: NamedColumns) -> Conversation:
    place = f"{row.name('conversations')}[]"
    turns = from_value_messages(parsed(row.need("conversations")), place, prompts=row.prompts)
    return _conversation(row, row.system() + turns)


def _prompt(row: NamedColumns) -> Conversation:
    messages = row.turns("prompt", "user") + row.turns("completion", "assistant")
    return _conversation(row, messages)


def _question(row: NamedColumns) -> Conversation:
    """Converts a prompt without an answer to a conversation with an empty answer."""
    turns = [*row.system(), *row.turns("prompt", "user")]
    if turns[-1].role != "assistant":
        turns.append(Message("assistant", ""))
    return _conversation(row, turns)


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
