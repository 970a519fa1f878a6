"""Formats: what each spelling says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.data.files.rows import Conversation, Message, Preference, Ranking, Text
from stoker.data.formats.all_formats import parse, read
from stoker.data.formats.detect_format import detect
from stoker.data.formats.pair_formats import MOST_PAIRS

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
    (
        "hh_rlhf",
        {side: f"\n\nHuman: Hi\n\nAssistant: {end}" for side, end in (("chosen", "Ho"), ("rejected", "No"))},
        PAIR,
    ),
    (
        "hh_rlhf",
        {
            "chosen": "\n\nHuman: A\n\nB\n\nAssistant: C\n\nHuman: D\n\nAssistant: Human: Ho",
            "rejected": "\n\nHuman: A\n\nB\n\nAssistant: C\n\nHuman: D\n\nAssistant:No ",
        },
        Preference(
            (Message("user", "A\n\nB"), Message("assistant", "C"), Message("user", "D")),
            (Message("assistant", "Human: Ho"),),
            (Message("assistant", "No"),),
        ),
    ),
]


@pytest.mark.parametrize(("format", "row", "example"), SAME)
def test_a_row_is_detected_and_says_what_it_says(format: str, row: dict[str, Any], example: object) -> None:
    assert detect([row]) == format
    assert parse(row, format) == example


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


SHOWN = (Message("system", "Be brief"), Message("user", "Hi"))
TERSE, LATER = {"role": "system", "content": "Be brief"}, {"role": "user", "content": "Sure?"}


@pytest.mark.parametrize(
    ("prompt", "before", "shared"),
    [
        ("Hi", [TERSE, USER], SHOWN),
        ("Hi ", [TERSE, USER], SHOWN),
        ([TERSE, USER], [USER], SHOWN),
        ([TERSE, USER], [], SHOWN),
        ([TERSE], [USER], SHOWN),
        ("Hi", [GOOD, USER], (Message("assistant", "Ho"), Message("user", "Hi"))),
        ("Hi", [USER, GOOD, LATER], (Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "Sure?"))),
        ("Sure?", [USER, GOOD, LATER], (Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "Sure?"))),
        ("Hi", [GOOD, LATER], (Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "Sure?"))),
    ],
)
def test_what_answers_share_is_their_prompt_once(
    prompt: Any, before: list[dict[str, Any]], shared: tuple[Message, ...]
) -> None:
    """Answers may hold the prompt, in whole or its last question; earlier answers that they share are not trained."""
    good, bad = ([*before, answer] for answer in (GOOD, BAD))
    assert parse({"prompt": prompt, "chosen": good, "rejected": bad}, "preference") == Preference(shared, *SIDES)
    ranking = parse({"prompt": prompt, "answers": [good, bad]}, "ranked")
    assert isinstance(ranking, Ranking) and (ranking.prompt, ranking.answers) == (shared, SIDES)
    for label in ({}, {"label": True}):
        found = parse({"prompt": prompt, "completion": good, **label}, "judged" if label else "prompt")
        assert isinstance(found, Conversation) and found.messages == (*shared, *PAIR.chosen)


def test_white_space_around_turns_is_no_difference_between_answers() -> None:
    row = {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [{"role": "user", "content": " Hi\n"}, BAD]}
    assert parse(row, "preference") == PAIR
    assert parse({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": "No"}, "preference") == PAIR


RANKED = {"prompt": "Hi", "answers": ["Ho", "No", [GOOD], {"role": "assistant", "content": "So"}]}


@pytest.mark.parametrize(
    ("more", "pairs"),
    [
        ({}, {(0, 1, 0.0), (0, 3, 0.0), (1, 2, 0.0), (1, 3, 0.0), (2, 3, 0.0)}),  # 0 and 2 say the same
        ({"ranks": [2, 1, 2, 3]}, {(1, 0, 0.0), (1, 2, 0.0), (0, 3, 0.0), (1, 3, 0.0), (2, 3, 0.0)}),
        ({"scores": "[1, 4.5, 1, 1]"}, {(1, 0, 3.5), (1, 2, 3.5), (1, 3, 3.5)}),
    ],
)
def test_ranked_answers_are_pairs(more: dict[str, Any], pairs: set[tuple[int, int, float]]) -> None:
    row = {**RANKED, **more}
    assert detect([row]) == "ranked" and read(row, "ranked")[1] == []
    found = parse(row, "ranked")
    assert isinstance(found, Ranking) and set(found.pairs) == pairs
    assert found.answers[2] == found.answers[0] == (Message("assistant", "Ho"),)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"answers": ["Ho"]}, "answers is not a list of two answers or more"),
        ({"answers": "Ho"}, "answers is not a list of two answers or more"),
        ({"scores": [1, 2]}, "scores has not one number for each answer"),
        ({"scores": [1, 2, "x", 3]}, "scores is not a number"),
        ({"scores": [1, 1, 1, 1]}, "no two answers differ in rank"),
        ({"answers": ["Ho", "Ho"]}, "no two answers differ in rank"),
    ],
)
def test_answers_without_an_order_are_refused(more: dict[str, Any], reason: str) -> None:
    assert parse({**RANKED, **more}, "ranked") == reason


HUGE = 10**310  # an integer that no float can hold


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("ranked", {"prompt": [{"role": "system", "content": ""}], "answers": ["a", "b"]}, "empty prompt"),
        ("question", {"prompt": [{"role": "system", "content": ""}]}, "empty prompt"),
        (
            "preference",
            {"prompt": [{"role": "system", "content": " "}], "chosen": "a", "rejected": "b"},
            "empty prompt",
        ),
        ("ranked", {"prompt": "q", "answers": ["a", "b"], "scores": [HUGE, 1]}, "scores is not a number"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": HUGE}, "margin is not a number"),
    ],
)
def test_empty_prompts_and_numbers_without_end_are_refused(format: str, row: dict[str, Any], reason: str) -> None:
    assert parse(row, format, {}) == reason


def test_of_many_answers_a_sample_of_their_pairs_is_taken() -> None:
    def ranking(answers: int) -> Ranking:
        scores = [number % 900 for number in range(answers)]
        row = {"prompt": "q", "answers": [f"answer {n}" for n in range(answers)], "scores": scores}
        found = parse(row, "ranked", {})
        assert isinstance(found, Ranking)
        return found

    few, many = ranking(45), ranking(1800)
    assert len(few.pairs) == 45 * 44 // 2 and not few.sampled
    assert len(many.pairs) == len(set(many.pairs)) == MOST_PAIRS and many.sampled
    assert all(margin == better % 900 - worse % 900 > 0 for better, worse, margin in many.pairs)
    assert len({answer for *pair, _ in many.pairs for answer in pair}) >= 1000
    assert ranking(1800) == many


def test_turns_after_the_last_answer_are_counted() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = parse({"messages": turns}, "messages", {})
    assert isinstance(found, Conversation)
    assert (len(found.messages), found.after) == (2, 1)


@pytest.mark.parametrize(
    ("format", "row", "turns"),
    [
        ("messages", {"messages": [USER, GOOD, USER]}, ("Hi", "Ho", "Hi", "")),
        ("messages", {"messages": [USER], "expected": "Ho"}, ("Hi", "")),
        ("messages", {"messages": [USER, {"role": "assistant", "content": " "}]}, ("Hi", "")),
        ("messages", {"messages": [USER, GOOD]}, ("Hi", "Ho")),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}]}, ("Hi", "")),
        ("instruction", {"instruction": "Hi", "output": ""}, ("Hi", "")),
        ("prompt", {"prompt": "Hi", "completion": None}, ("Hi", "")),
        ("judged", {"messages": [USER], "label": True}, ("Hi", "")),
    ],
)
def test_all_turns_before_an_answer_at_the_end_are_the_prompt(
    format: str, row: dict[str, Any], turns: tuple[str, ...]
) -> None:
    found, ignored = read(row, format, prompts=True)
    assert isinstance(found, Conversation) and ignored == [] and not found.after
    assert tuple(message.content for message in found.messages) == turns


def test_a_prompt_needs_a_turn_to_answer() -> None:
    system = {"role": "system", "content": "Be brief"}
    assert parse({"messages": [system]}, "messages", prompts=True) == "only a system message"
    assert parse({"prompt": [system]}, "question", prompts=True) == "only a system message"
    assert parse({"messages": [USER, {**GOOD, "content": ""}, USER]}, "messages", prompts=True) == "empty answer"
