"""No JSON value raises in reading a row or in detecting its format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.data.files.rows import Conversation, Preference, Ranking
from stoker.data.formats.all_formats import FORMATS, parse
from stoker.data.formats.detect_format import detect
from stoker.errors import UserError

WORDS = sorted(
    {"role", "content", "from", "value", "type", "name", "arguments", "input", "system", "history", "tools"}
    | {column for format in FORMATS.values() for column in format.needed}
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call", "text"])
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | ROLE
KEY = st.sampled_from(WORDS) | st.text(max_size=3)
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY, inner, max_size=4), max_leaves=12
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON, "from": JSON, "value": JSON})
VALUE = JSON | st.lists(MESSAGE, max_size=3) | JSON.map(json.dumps)
ROW = st.dictionaries(KEY, VALUE, max_size=5) | st.text(max_size=5)


@settings(max_examples=400, deadline=None)
@given(row=ROW, format=st.sampled_from(sorted(FORMATS)), columns=st.dictionaries(KEY, KEY, max_size=2))
@example(row={"answers": True}, format="scored", columns={})
@example(row={"answers": ["a", "b"], "scores": [[1], {}]}, format="scored", columns={})
@example(row={"prompt": "a", "answers": ["b", "c"], "scores": [1, 2]}, format="scored", columns={})
def test_no_json_value_raises(row: dict[str, Any] | str, format: str, columns: dict[str, str]) -> None:
    found = parse(row, format, columns)
    if isinstance(found, str):
        assert found and "\n" not in found
    elif isinstance(found, Conversation):
        assert found.messages[-1].role == "assistant"
    elif isinstance(found, Preference):
        assert found.prompt and found.chosen != found.rejected
    elif isinstance(found, Ranking):
        assert found.prompt and found.pairs
    else:
        assert found.text.strip()


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(ROW, max_size=4), columns=st.dictionaries(KEY, KEY, max_size=2))
@pytest.mark.slow
def test_detecting_names_a_format_or_tells_the_user(rows: list[dict[str, Any] | str], columns: dict[str, str]) -> None:
    try:
        assert detect(rows, columns) in FORMATS
    except UserError as error:
        assert error.problems[0].suggestion
