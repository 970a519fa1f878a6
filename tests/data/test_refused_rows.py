"""Rows that a format refuses, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.data.formats.all_formats import parse

NAN = float("nan")
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in [("user", "Hi"), ("assistant", "Ho"), ("assistant", "No")])
LATER = {"role": "user", "content": "Bye"}
SYSTEM, BRIEF = ({"role": "system", "content": content} for content in ("Be kind", "Be brief"))
HH = "\n\nHuman: Hi\n\nAssistant: Ho"
OTHER = "has turns before its answer other than the prompt"
DIFFERENT = "chosen and rejected have different turns before their answers"
THOUGHT = GOOD | {"reasoning_content": "Hm"}


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
    ("instruction", {"instruction": "Hi", "output": ["Ho"]}, "content is not text: a list with a string in it"),
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
    ("preference", {"prompt": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [BAD]}, DIFFERENT),
    ("preference", {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [LATER, BAD]}, f"rejected {OTHER}"),
    (
        "preference",
        {"prompt": "Bye", "chosen": [USER, GOOD, LATER, BAD], "rejected": [USER, BAD, LATER, GOOD]},
        DIFFERENT,
    ),
    ("preference", {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, LATER, BAD]}, DIFFERENT),
    (
        "preference",
        {"prompt": [SYSTEM], "chosen": [BRIEF, USER, GOOD], "rejected": [BRIEF, USER, BAD]},
        f"chosen {OTHER}",
    ),
    ("hh_rlhf", {"chosen": HH, "rejected": "Hi"}, "rejected does not begin with \\n\\nHuman"),
    ("hh_rlhf", {"chosen": HH, "rejected": [USER]}, "rejected does not begin with \\n\\nHuman"),
    ("hh_rlhf", {"chosen": HH, "rejected": HH[:11]}, "rejected does not end with a turn of the assistant"),
    ("hh_rlhf", {"chosen": HH, "rejected": f"{HH[:11]}\n\nAssistant:"}, "empty answer"),
    ("hh_rlhf", {"chosen": HH, "rejected": HH}, "chosen equals rejected"),
    ("hh_rlhf", {"chosen": HH, "rejected": HH.replace("Hi", "Bye")}, DIFFERENT),
    ("ranked", {"prompt": "Hi", "answers": [[USER, GOOD], [LATER, BAD]]}, f"answers {OTHER}"),
    ("prompt", {"prompt": "Hi", "completion": [LATER, GOOD]}, f"completion {OTHER}"),
    ("judged", {"prompt": "Hi", "completion": [LATER, GOOD], "label": True}, f"completion {OTHER}"),
    ("preference", {"prompt": "Hi", "chosen": "Ho"}, "missing column: rejected"),
]


@pytest.mark.parametrize(("format", "row", "reason"), REFUSED)
def test_a_row_is_refused_with_its_reason(format: str, row: Any, reason: str) -> None:
    assert parse(row, format) == reason
