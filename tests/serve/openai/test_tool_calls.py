"""Tool calls of each family are found, whole or in pieces, and nothing that was written is lost."""

from __future__ import annotations

import json
import random
import time

import pytest

from stoker.serve.openai.tool_calls import (
    GLM,
    HERMES,
    LLAMA,
    MISTRAL,
    XML,
    CallFinder,
    ForcedCall,
    ToolFormat,
    forced_schema,
    tool_format_of,
)

SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
PARIS = ("weather", {"city": "Paris", "days": 2})
ROME = ("weather", {"city": "007", "days": 1})

HALF = ("weather", {"city": "\ud800"})
HALF_NAME = '{"name": "\\ud800", "arguments": {}}'
ONE = '{"name": "weather", "arguments": {"city": "Paris"}}'
NAN = '{"name": "weather", "arguments": {"days": NaN}}'

CASES = [
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>', "", [PARIS]),
    (
        HERMES,
        'Well <b>.<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"007\\", \\"days\\": 1}"}</tool_call> Bye',
        "Well <b>.\n Bye",
        [PARIS, ROME],
    ),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}',
        "",
        [PARIS],
    ),  # cut by its end
    (HERMES, "<tool_call>{broken}</tool_call> and <tool_cal", "<tool_call>{broken}</tool_call> and <tool_cal", []),
    (HERMES, "<tool_call>never ended", "<tool_call>never ended", []),
    (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\n007\n</parameter>\n<parameter=days>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [ROME],
    ),
    (
        GLM,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>007</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>",
        "",
        [ROME],
    ),
    (HERMES, f"<tool_call>{NAN}</tool_call>", f"<tool_call>{NAN}</tool_call>", []),
    (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]', "", [PARIS]),
    (
        MISTRAL,
        'So: [TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]weather{"city": "007", "days": 1}',
        "So: ",
        [PARIS, ROME],
    ),
    (MISTRAL, f"[TOOL_CALLS]{ONE}", f"[TOOL_CALLS]{ONE}", []),  # the name comes before the brace
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>', "", [HALF]),
    (HERMES, f"<tool_call>{HALF_NAME}</tool_call>", f"<tool_call>{HALF_NAME}</tool_call>", []),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", [PARIS]),
    (
        LLAMA,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "weather", "parameters": {"city": "007", "days": 1}}',
        "",
        [PARIS, ROME],
    ),
    (LLAMA, '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', []),  # no tool has this name
    (LLAMA, f'{ONE}; {{"name": "Ann", "arguments": {{}}}}', f'{ONE}; {{"name": "Ann", "arguments": {{}}}}', []),
    (LLAMA, '{"only": "JSON"}', '{"only": "JSON"}', []),
    (LLAMA, 'An object: {"name": "weather", "parameters": {}}', 'An object: {"name": "weather", "parameters": {}}', []),
]


@pytest.mark.parametrize(("form", "text", "said", "called"), CASES)
def test_calls_are_found_however_the_text_comes(
    form: ToolFormat, text: str, said: str, called: list[tuple[str, dict[str, object]]]
) -> None:
    draw = random.Random(3)
    for pieces in ([text], list(text), None, None, None):
        finder, got, calls = CallFinder(form, SCHEMAS), "", []
        cuts = sorted(draw.sample(range(len(text)), 4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)] if pieces is None else pieces
        for piece in parts:
            more, found = finder.push(piece)
            got, calls = got + more, calls + found
        more, found = finder.finish()
        got, calls = got + more, calls + found
        assert got == said
        assert [(call.name, json.loads(call.arguments)) for call in calls] == called
        assert all(call.arguments.encode() for call in calls)
        assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "1e5", "1e5"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "[1]", [1]),
    ],
)
def test_parameters_written_as_text_have_a_type_of_their_schema(schema: object, text: str, value: object) -> None:
    finder = CallFinder(GLM, {"weather": {"properties": {"city": schema}}})
    call = f"<tool_call>weather<arg_key>city</arg_key><arg_value>{text}</arg_value></tool_call>"
    _, (found,) = finder.push(call)
    assert json.loads(found.arguments) == {"city": value}


@pytest.mark.parametrize("text", ['{"name": "f", "arguments": {"a": 1', '{"name": "f", "arguments": ' + "[" * 100_000])
def test_a_forced_call_that_was_cut_off_stays_text(text: str) -> None:
    forced = ForcedCall()
    assert forced.push(text[:9]) == forced.push(text[9:]) == ("", [])
    assert forced.finish() == (text, [])


def test_text_is_not_held_back_without_need() -> None:
    finder = CallFinder(HERMES, {})
    assert finder.push("a < b")[0] == "a < b"
    assert finder.push(" <tool")[0] == " "
    assert finder.push("s> c")[0] == "<tools> c"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\n{{ tool_call | tojson }}\n</tool_call>", HERMES),
        ("<tool_call>\n<function=example>\n<parameter=a>", XML),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>", GLM),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_seen_in_the_template(template: str, form: ToolFormat | None) -> None:
    assert tool_format_of(template) is form


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (XML, "<function=f>" + "<parameter=a>" * 30_000 + "</function>"),
        (XML, "<function=f>" + "<parameter=" * 30_000 + "</parameter></function>"),
        (XML, "<function=f>" + "<parameter=a>" * 30_000 + "</parameter></function>"),
        (GLM, "f" + "<arg_key>" * 30_000),
        (GLM, "f" + "<arg_key>a</arg_key>" * 30_000 + "<arg_value>"),
        (GLM, "f" + "<arg_key>" * 30_000 + "</arg_value>"),
    ],
)
def test_a_call_that_repeats_an_opening_mark_is_read_in_linear_time(form: ToolFormat, body: str) -> None:
    begin = time.process_time()
    form.read(body, {})
    assert time.process_time() - begin < 3  # seconds; minutes where each mark is searched to the end


def test_a_value_of_glm_may_contain_marks() -> None:
    text = "f<arg_key> a </arg_key>\n<arg_value>1 <arg_key> 2</arg_value><arg_key>b</arg_key>"
    text += "<arg_key>c</arg_key><arg_value>3</arg_value>"
    [call] = GLM.read(text, {})
    assert json.loads(call.arguments) == {"a": "1 <arg_key> 2", "c": 3}


def test_a_forced_call_has_only_the_arguments_that_its_schema_names_unless_it_says_more() -> None:
    tools = {"weather": SCHEMAS["weather"], "any": {}, "open": {"properties": {}, "patternProperties": {"^x": {}}}}
    tools["unnamed"] = {"properties": {"a": {}}, "required": ["a", "b"]}
    arguments = [call["properties"]["arguments"] for call in forced_schema(tools, list(tools))["anyOf"]]
    assert [each.get("additionalProperties") for each in arguments] == [False, None, None, None]
