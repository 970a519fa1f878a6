"""Formats: what each spelling says, and why a row is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.data.detect_format import detect
from stoker.data.formats import parse, read
from stoker.data.rows import Conversation, Message, Preference, Text

NAN = float("nan")
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def said(*turns: str) -> Conversation:
    """A conversation from "role: content"."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return Conversation(tuple(Message(role, content) for role, content in pairs))  # type: ignore[arg-type]


ASKED = said("user: Hi", "assistant: Ho")
SYSTEM = said("system: Be brief", "user: Hi", "assistant: Ho")

# (format as detected, row, what it says)
SAME: list[tuple[str, dict[str, Any], Any]] = [
    ("instruction", {"instruction": "Hi", "output": "Ho"}, ASKED),
    ("instruction", {"instruction": "Hi", "input": "", "output": "Ho"}, ASKED),
    ("instruction", {"instruction": "Hi", "input": None, "output": "Ho", "text": "Below is"}, ASKED),
    ("instruction", {"instruction": "Hi", "input": NAN, "output": "Ho"}, ASKED),
    (
        "instruction",
        {"instruction": "Hi", "input": "you", "output": "Ho"},
        said("user: Hi\n\nyou", "assistant: Ho"),
    ),
    ("instruction", {"instruction": "", "input": "Hi", "output": "Ho"}, ASKED),
    ("instruction", {"question": "Hi", "answer": "Ho"}, ASKED),
    ("instruction", {"query": "Hi", "response": "Ho"}, ASKED),
    ("instruction", {"prompt": "Hi", "response": "Ho"}, ASKED),
    ("instruction", {"instruction": "Hi", "context": "", "response": "Ho", "category": "open"}, ASKED),
    ("instruction", {"instruction": "Hi", "output": "Ho", "system": "Be brief"}, SYSTEM),
    (
        "instruction",
        {"instruction": "C", "output": "D", "history": [["A", "B"]]},
        said("user: A", "assistant: B", "user: C", "assistant: D"),
    ),
    ("prompt", {"prompt": "Hi", "completion": "Ho"}, ASKED),
    ("prompt", {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Ho"}, ASKED),
    ("prompt", {"prompt": "Hi", "completion": [{"role": "assistant", "content": "Ho"}]}, ASKED),
    ("prompt", {"prompt": "Hi", "completion": '{"n": [1]}'}, said("user: Hi", 'assistant: {"n": [1]}')),
    ("prompt", {"prompt": "[1, 2]", "completion": "[3]"}, said("user: [1, 2]", "assistant: [3]")),
    ("text", {"text": " Once. "}, Text(" Once. ")),
    ("text", {"content": "Once.", "id": 7}, Text("Once.")),
    (
        "messages",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        ASKED,
    ),
    (
        "messages",
        {"conversations": [{"role": "User", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        ASKED,
    ),
    (
        "messages",
        {"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]'},
        ASKED,
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "developer", "content": "Be brief"},
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                {"role": "assistant", "content": "Ho"},
                {"role": "user", "content": "and now nobody answers"},
            ]
        },
        SYSTEM,
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "system", "content": ""},
                *({"role": r, "content": c} for r, c in [("user", "Hi"), ("assistant", "Ho")]),
            ]
        },
        ASKED,
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": "A"},
                {"role": "user", "content": "B"},
                {"role": "assistant", "content": "C"},
            ]
        },
        said("user: A", "user: B", "assistant: C"),
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": "1+1?", "name": "Ann", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "", "tool_call_id": "c1"},
                {"role": "assistant", "content": "2", "reasoning_content": "easy"},
            ],
            "tools": '[{"type": "function"}]',
        },
        Conversation(
            (
                Message("user", "1+1?", {"name": "Ann"}),
                Message("assistant", "", {"tool_calls": [CALL]}),
                Message("tool", "", {"tool_call_id": "c1"}),
                Message("assistant", "2", {"reasoning_content": "easy"}),
            ),
            ({"type": "function"},),
        ),
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        ASKED,
    ),
    (
        "sharegpt",
        {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
            "system": "Be brief",
        },
        SYSTEM,
    ),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "1+1?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "Two"},
            ],
            "tools": [],
        },
        Conversation(
            (
                Message("user", "1+1?"),
                Message(
                    "assistant",
                    "",
                    {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
                ),
                Message("tool", "2"),
                Message("assistant", "Two"),
            )
        ),
    ),
]

PAIR = Preference((Message("user", "Hi"),), (Message("assistant", "Ho"),), (Message("assistant", "No"),))
ASK, SIDES = (Message("user", "H\n\ni"),), (PAIR.chosen, PAIR.rejected)
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in [("user", "Hi"), ("assistant", "Ho"), ("assistant", "No")])
THOUGHT = GOOD | {"reasoning_content": "Hm"}


def called(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


SAME += [
    ("preference", {"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, PAIR),
    ("preference", {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
    ("preference", {"prompt": "Hi", "chosen": GOOD, "rejected": BAD}, PAIR),
    ("preference", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
    ("preference", {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, PAIR),
    (
        "preference",
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Ho"},
            "rejected": {"from": "gpt", "value": "No"},
        },
        PAIR,
    ),
    ("preference", {"messages": [USER], "chosen": "Ho", "rejected": "No", "system": ""}, PAIR),
    ("preference", {"instruction": "H", "input": "i", "chosen": "Ho", "rejected": "No"}, Preference(ASK, *SIDES)),
    (
        "preference",
        {"question": "Hi", "chosen": "Ho", "rejected": "No", "system": "Be brief", "tools": '[{"name": "f"}]'},
        Preference((Message("system", "Be brief"), Message("user", "Hi")), *SIDES, ({"name": "f"},)),
    ),
    ("judged", {"messages": [USER, GOOD], "label": True}, replace(ASKED, good=True)),
    ("judged", {"prompt": "Hi", "completion": "Ho", "label": "False"}, replace(ASKED, good=False)),
    ("judged", {"instruction": "Hi", "output": "Ho", "label": 0}, replace(ASKED, good=False)),
    ("messages", {"messages": [USER, GOOD], "label": "greeting"}, ASKED),
    ("instruction", {"instruction": 6, "output": True}, said("user: 6", "assistant: true")),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "value": "Hi"}], "loss_weight": 0.0}, GOOD]},
        Conversation((Message("user", "Hi", {}, False), Message("assistant", "Ho"))),
    ),
    (
        "messages",
        {"messages": [USER, GOOD | {"weight": 0}, USER, GOOD | {"weight": 1}]},
        Conversation(
            (
                Message("user", "Hi"),
                Message("assistant", "Ho", {}, False),
                Message("user", "Hi"),
                Message("assistant", "Ho"),
            )
        ),
    ),
    (
        "messages",
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm"},
                        {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    ],
                },
                {"role": "tool", "content": [{"type": "text", "value": "1"}]},
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
            ]
        },
        Conversation(
            (
                Message("user", "Hi"),
                Message("assistant", "", {"reasoning_content": "Hm", "tool_calls": [called({"a": 1})]}),
                Message("tool", "1"),
                Message("assistant", "", {"tool_calls": [called("{}")]}),
            )
        ),
    ),
    ("preference", {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": []}, PAIR),
]


@pytest.mark.parametrize(("format", "row", "example"), SAME)
def test_a_row_is_detected_and_says_what_it_says(format: str, row: dict[str, Any], example: object) -> None:
    assert detect([row]) == format
    assert parse(row, format) == example


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


REFUSED: list[tuple[str, Any, str]] = [
    ("instruction", {"instruction": "Hi", "output": ""}, "empty answer"),
    ("instruction", {"instruction": "Hi", "output": " \n"}, "empty answer"),
    ("instruction", {"instruction": "Hi", "output": None}, "empty answer"),
    ("instruction", {"instruction": "Hi", "output": NAN}, "NaN in column output"),
    ("instruction", {"question": "Hi", "answer": NAN}, "NaN in column answer"),
    ("instruction", {"instruction": NAN, "output": "Ho"}, "NaN in column instruction"),
    ("instruction", {"instruction": " ", "input": "", "output": "Ho"}, "empty instruction"),
    ("instruction", {"instruction": "Hi"}, "missing column: output"),
    ("instruction", {}, "missing column: instruction"),
    ("instruction", "a document", "not an object: a document"),
    ("instruction", {"instruction": "Hi", "output": {"a": 42}}, "content is not text: an object"),
    ("instruction", {"instruction": "Hi", "output": float("inf")}, "content is not text: Infinity"),
    ("instruction", {"instruction": "Hi", "output": ["Ho"]}, "content is not text: a string"),
    ("instruction", {"instruction": "Hi", "output": "half \ud83d"}, "half a surrogate pair in a string"),
    (
        "instruction",
        {"instruction": "A", "output": "B", "history": ["A"]},
        "history is not a list of [question, answer]",
    ),
    ("messages", {"messages": []}, "no messages"),
    ("messages", {"messages": None}, "not a list of messages: null"),
    ("messages", {"messages": "Hi"}, "not a list of messages: a string"),
    ("messages", {"messages": ["Hi"]}, "not a message: a string"),
    ("messages", {"messages": [{"content": "Hi"}]}, "message without role"),
    ("messages", {"conversation": [{"role": "user"}]}, "empty user turn"),
    ("messages", turns(("system", "Be brief")), "only a system message"),
    ("messages", turns(("system", "Be brief"), ("user", "Hi")), "no assistant turn"),
    ("messages", turns(("user", "Hi"), ("bot", "Ho")), "unknown role: 'bot'"),
    ("messages", turns(("user", "Hi"), (None, "Ho")), "unknown role: 'None'"),
    ("messages", turns(("user", "Hi"), ("assistant", "")), "empty answer"),
    ("messages", turns(("user", ""), ("assistant", "Ho")), "empty user turn"),
    ("messages", turns(("user", {"a": 1}), ("assistant", "Ho")), "content is not text: an object"),
    ("messages", turns(("user", NAN), ("assistant", "Ho")), "content is not text: NaN"),
    (
        "messages",
        turns(("user", [{"type": "image_url", "image_url": {}}]), ("assistant", "Ho")),
        "a picture cannot be trained: a part of type 'image_url'",
    ),
    (
        "messages",
        turns(("user", [{"type": "input_audio", "input_audio": {}}]), ("assistant", "Ho")),
        "sound cannot be trained: a part of type 'input_audio'",
    ),
    ("messages", turns(("user", [{"type": "poem", "text": "Hi"}])), "content is not text: a part of type 'poem'"),
    ("messages", {"messages": [USER, GOOD | {"weight": 0.5}]}, "a turn's weight is neither 0 nor 1: 0.5"),
    ("messages", {"messages": [USER, GOOD | {"loss_weight": "0"}]}, "a turn's loss_weight is neither 0 nor 1: 0"),
    ("messages", {"messages": [USER, GOOD | {"weight": 0.0}]}, "every answer has the weight 0"),
    (
        "messages",
        {"messages": [USER, {**THOUGHT, "content": [{"type": "reasoning", "value": "Hm"}]}]},
        "a turn has reasoning_content beside its content and in it",
    ),
    ("judged", turns(("user", "Hi"), ("assistant", "Ho")) | {"label": "so-so"}, "label is neither true nor false"),
    ("judged", {"label": True, "text": "Hi"}, "no conversation beside the label"),
    (
        "messages",
        turns(("user", "Hi"), ("assistant", "Ho")) | {"tools": "[{"},
        "tools is not a list of objects",
    ),
    ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}]}, "no assistant turn"),
    ("sharegpt", {"conversations": [{"from": "robot", "value": "Hi"}]}, "unknown role: 'robot'"),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "add(1)"}]},
        "function call is not JSON with a name",
    ),
    ("prompt", {"prompt": "Hi", "completion": ""}, "empty answer"),
    ("prompt", {"prompt": "", "completion": "Ho"}, "empty user turn"),
    ("prompt", {"prompt": "Hi"}, "missing column: completion"),
    ("text", {"text": " \n"}, "empty text"),
    ("text", {"text": None}, "empty text"),
    ("text", {"text": NAN}, "NaN in column text"),
    ("text", {"text": [3.5]}, "content is not text: a list"),
    ("text", "", "empty text"),
    ("preference", {"prompt": "Hi", "chosen": "Ho", "rejected": "Ho"}, "chosen equals rejected"),
    ("preference", {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen equals rejected"),
    ("preference", {"chosen": "Ho", "rejected": "No"}, "no prompt: chosen and rejected share no first turns"),
    ("preference", {"prompt": "Hi", "chosen": [GOOD], "rejected": [GOOD, USER]}, "chosen equals rejected"),
    ("preference", {"prompt": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [BAD]}, "no assistant turn"),
    ("preference", {"prompt": "Hi", "chosen": "Ho"}, "missing column: rejected"),
]


@pytest.mark.parametrize(("format", "row", "reason"), REFUSED)
def test_a_row_is_refused_with_its_reason(format: str, row: Any, reason: str) -> None:
    assert parse(row, format) == reason


def test_columns_are_renamed_first() -> None:
    columns = {"instruction": "ask", "output": "reply"}
    row = {"ask": "Hi", "reply": "Ho", "output": "not this"}
    assert detect([row], columns) == "instruction"
    assert parse(row, "instruction", columns) == ASKED
    assert parse({"ask": "Hi"}, "instruction", columns) == "missing column: reply"
    assert parse({"ask": "Hi", "reply": NAN}, "instruction", columns) == "NaN in column reply"


def test_columns_that_no_format_reads_are_named() -> None:
    row = {"instruction": "Hi", "output": "Ho", "question": "Hi", "input": "", "score": 0, "tags": [], "note": " "}
    assert read(row, "instruction")[1] == ["question", "score"]
    assert read({"messages": [USER, GOOD], "label": False, "id": 1}, "messages")[1] == ["label", "id"]


def test_a_preference_keeps_a_last_turn_for_each_side() -> None:
    longer = [USER, GOOD, USER, BAD]
    found = parse({"chosen": [USER, GOOD], "rejected": longer}, "preference")
    assert found == Preference(
        (Message("user", "Hi"),),
        (Message("assistant", "Ho"),),
        (Message("assistant", "Ho"), Message("user", "Hi"), Message("assistant", "No")),
    )
