"""Chat templates against transformers' own rendering, and spans of answers against what people would mark."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from stoker.data.files.rows import Message
from stoker.data.templates.chat_template import BUILT_IN, ChatTemplate, as_template_message
from stoker.data.templates.template_environment import TemplateRefused, compile_template

INST = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' }}{% if loop.first and system is defined %}"
    "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}{{ message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}"
)
THINKING = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {"inst": INST, "thinking": THINKING, "no-system": NO_SYSTEM, **BUILT_IN}
NAMES = (("bos_token", "<|im_start|>"), ("eos_token", "<|im_end|>"))

USER = {"role": "user", "content": "Is it wet?"}
YES = {"role": "assistant", "content": "Yes."}
WHY = {"role": "user", "content": "Why 💧?"}
RAIN = {"role": "assistant", "content": "It rained.\nA lot — e\u0301tude."}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nYes."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
}
RESULT = {"role": "tool", "content": '{"rain": true}'}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CONVERSATIONS = [
    [USER, YES],
    [SYSTEM, USER, YES],
    [USER, YES, WHY, RAIN],
    [USER, THOUGHT, WHY, THOUGHT],
    [SYSTEM, USER, YES, WHY, RAIN, USER, YES],
]


@pytest.fixture(scope="module")
def peer(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_text_equals_that_of_transformers(name: str, prompt: bool, peer: Any) -> None:
    template = ChatTemplate(TEMPLATES[name], NAMES)
    for messages in CONVERSATIONS:
        try:
            wanted = peer.apply_chat_template(
                messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt
            )
        except Exception:
            with pytest.raises(TemplateRefused):
                template.render(messages, prompt=prompt)
        else:
            assert template.render(messages, prompt=prompt) == wanted


def test_tools_and_calls_equal_those_of_transformers(peer: Any) -> None:
    messages = [USER, CALL, RESULT, RAIN]
    wanted = peer.apply_chat_template(messages, tools=TOOLS, chat_template=THINKING, tokenize=False)
    assert ChatTemplate(THINKING, NAMES).render(messages, TOOLS) == wanted
    assert '"city": "Köln"' in wanted


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_reasoning_is_found_under_its_names_as_in_transformers(name: str, peer: Any) -> None:
    answer = {"role": "assistant", "content": "Yes.", name: "Hm."}
    wanted = peer.apply_chat_template([USER, answer], chat_template=THINKING, tokenize=False)
    read = as_template_message(Message("assistant", "Yes.", {name: "Hm."}))
    assert ChatTemplate(THINKING, NAMES).render([USER, read]) == wanted
    assert "<think>\nHm." in wanted
    assert read["thinking"] == read["reasoning_content"] == "Hm."


def test_empty_reasoning_is_reasoning_and_an_empty_list_of_tools_is_none() -> None:
    assert as_template_message(Message("assistant", "Yes.", {"thinking": ""}))["reasoning_content"] == ""
    assert ChatTemplate("{{ tools }}", NAMES).render([USER], []) == "None"


def test_arguments_in_a_string_become_the_object_they_say() -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "arguments": arguments}}]

    read = as_template_message(Message("assistant", "", {"tool_calls": call('{"a": [1]}'), "role": "user"}))
    assert read["role"] == "assistant"
    assert read["tool_calls"] == call({"a": [1]})
    for odd in ("no json", "[1]", 3):
        kept = as_template_message(Message("assistant", "", {"tool_calls": call(odd)}))
        assert kept["tool_calls"] == call(odd)


def trained(name: str, messages: list[dict[str, Any]], train_on: str = "all") -> list[str]:
    rendered = ChatTemplate(TEMPLATES[name], NAMES).render_trained(messages, train_on=train_on)
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("chatml", ["Yes.<|im_end|>\n", "It rained.\nA lot — e\u0301tude.<|im_end|>\n"]),
        ("thinking", ["Yes.<|im_end|>\n", "It rained.\nA lot — e\u0301tude.<|im_end|>\n"]),
        ("inst", [" Yes.<|im_end|>", " It rained.\nA lot — e\u0301tude.<|im_end|>"]),
        ("no-system", ["Yes.<end_of_turn>\n", "It rained.\nA lot — e\u0301tude.<end_of_turn>\n"]),
        ("plain", ["Yes.<|im_end|>\n\n", "It rained.\nA lot — e\u0301tude.<|im_end|>\n\n"]),
        ("none", ["Yes.<|im_end|>", "It rained.\nA lot — e\u0301tude.<|im_end|>"]),
    ],
)
def test_spans_are_the_answers_and_what_closes_them(name: str, answers: list[str]) -> None:
    messages = [USER, YES, WHY, RAIN]
    assert trained(name, messages) == answers
    assert trained(name, messages, "last") == answers[1:]
    assert ChatTemplate(TEMPLATES[name], NAMES).render_trained(messages).exact_prefix


def test_an_answer_that_the_template_shortens_in_the_past_is_found_as_it_stands_there() -> None:
    messages = [USER, THOUGHT, WHY, THOUGHT]
    last = "<think>\nLet me see.\n</think>\n\nYes.<|im_end|>\n"
    assert trained("thinking", messages) == ["Yes.<|im_end|>\n", last]
    assert trained("thinking", messages, "last") == [last]


def test_answers_are_the_same_behind_tools() -> None:
    template = ChatTemplate(THINKING, NAMES)
    for messages in ([USER, YES, WHY, RAIN], [USER, THOUGHT, WHY, THOUGHT]):
        rendered = template.render_trained(messages, TOOLS)
        assert "# Tools" in rendered.text
        assert [rendered.text[a:b] for a, b in rendered.spans] == trained("thinking", messages)


def test_a_stop_token_that_only_the_last_answer_has_closes_no_other() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}{% if m.role == 'assistant' %}"
        "<|im_end|>{% endif %}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rendered = ChatTemplate(template).render_trained([USER, THOUGHT, WHY, YES])
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["\n\nYes.", "Yes.<|im_end|>"]


def test_what_the_prompt_and_the_answer_both_begin_with_is_not_trained() -> None:
    prompt = "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    assert THINKING.endswith(prompt)
    opened = prompt.replace("assistant\\n", "assistant\\n<think>\\n\\n</think>")
    template = THINKING.removesuffix(prompt) + opened
    rendered = ChatTemplate(template, NAMES).render_trained([USER, {**YES, "reasoning_content": "Hm."}])
    assert not rendered.exact_prefix
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Hm.\n</think>\n\nYes.<|im_end|>\n"]


def test_an_answer_that_repeats_its_question_is_still_found() -> None:
    same = {"role": "assistant", "content": "Is it wet?"}
    for name in TEMPLATES:
        spans = trained(name, [USER, same, USER, same])
        assert [span.strip().startswith("Is it wet?") for span in spans] == [True, True]


def test_a_call_is_trained_and_its_result_is_not() -> None:
    spans = trained("thinking", [USER, CALL, RESULT, RAIN])
    assert len(spans) == 2
    assert "<tool_call>" in spans[0]
    assert "rain" not in spans[0]
    assert spans[1].startswith("It rained.")


def test_a_prompt_that_is_not_a_prefix_is_said() -> None:
    """The generation prompt ends in an empty thought that the whole does not have."""
    template = BUILT_IN["chatml"].replace(
        "<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think></think>' }}{% endif %}"
    )
    assert template != BUILT_IN["chatml"]
    rendered = ChatTemplate(template, NAMES).render_trained([USER, YES])
    assert not rendered.exact_prefix
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Yes.<|im_end|>\n"]


@pytest.mark.parametrize(
    "before",
    [
        "{% if not messages %}{{ raise_exception('ask') }}{% endif %}",
        "{% if messages and messages[0]['role'] != 'system' %}{{ 'Be good.<|im_end|>\n' }}{% endif %}",
        "",
    ],
    ids=["refuses no turns", "system prompt of its own", "none"],
)
def test_a_greeting_is_trained_and_nothing_before_it(before: str) -> None:
    template = ChatTemplate(before + BUILT_IN["chatml"], NAMES)
    for greeting, after in ((YES, [USER, RAIN]), ({**YES, "content": "x"}, [USER, RAIN]), (YES, [])):
        rendered = template.render_trained([greeting, *after])
        answers = [turn["content"] + "<|im_end|>\n" for turn in (greeting, *after[1:])]
        assert [rendered.text[a:b] for a, b in rendered.spans] == answers
        assert rendered.exact_prefix == (not before)


def test_a_greeting_may_follow_a_system_message_and_begins_with_its_reasoning() -> None:
    refuses = "{% if not messages or (messages | length == 1 and messages[0]['role'] == 'system') %}"
    refuses += "{{ raise_exception('ask') }}{% endif %}"
    rendered = ChatTemplate(refuses + BUILT_IN["chatml"], NAMES).render_trained([SYSTEM, YES, USER, RAIN])
    spans = [rendered.text[a:b] for a, b in rendered.spans]
    assert spans == [f"{turn['content']}<|im_end|>\n" for turn in (YES, RAIN)] and not rendered.exact_prefix
    rendered = ChatTemplate(refuses + THINKING, NAMES).render_trained([{**YES, "reasoning_content": "Hm."}])
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"]


def test_the_mark_of_a_silent_answer_is_written_by_no_model_and_stays() -> None:
    messages = [USER, YES, WHY, RAIN]
    rendered = ChatTemplate(BUILT_IN["chatml"]).render_trained(messages, train_on="everything", silent=[1])
    question, after = (
        f"<|im_start|>user\n{turn['content']}<|im_end|>\n<|im_start|>assistant\n" for turn in (USER, WHY)
    )
    assert [rendered.text[a:b] for a, b in rendered.spans] == [question, f"{after}{RAIN['content']}<|im_end|>\n"]


def test_a_conversation_whose_prompt_is_refused_is_refused() -> None:
    refuses = "{% if add_generation_prompt %}{{ raise_exception('no prompts') }}{% endif %}"
    with pytest.raises(TemplateRefused, match="no prompts"):
        ChatTemplate(refuses + BUILT_IN["chatml"], NAMES).render_trained([USER, YES])


def test_the_placeholders_have_no_system_message_where_the_template_refuses_it() -> None:
    assert "<start_of_turn>user\nx" in ChatTemplate(NO_SYSTEM, NAMES).render_placeholders()
    assert ChatTemplate("{{ raise_exception('never') }}", NAMES).render_placeholders() == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[9]['role'] + 'x' }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}", "SecurityError"),
        (
            "{% for m in messages %}{{ m.role if m.role == 'user' }}{% endfor %}",
            "writes nothing for the answer",
        ),
    ],
)
def test_what_a_template_raises_is_a_reason(template: str, reason: str) -> None:
    with pytest.raises(TemplateRefused, match=reason):
        ChatTemplate(template, NAMES).render_trained([USER, YES])


def test_a_system_message_is_refused_where_the_template_refuses_it() -> None:
    with pytest.raises(TemplateRefused, match="System role not supported"):
        ChatTemplate(NO_SYSTEM, NAMES).render_trained([SYSTEM, USER, YES])


def test_invalid_jinja_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"not valid Jinja.*line 2"):
        compile_template("{{ bos_token }}\n{% for %}")


def test_marks_of_generation_are_let_through(peer: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    wanted = peer.apply_chat_template([USER, YES], chat_template=template, tokenize=False)
    assert ChatTemplate(template, NAMES).render([USER, YES]) == wanted == "Is it wet?Yes."
