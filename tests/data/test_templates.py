"""Which chat template a source is rendered with, and what is said of one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from stoker.data.chat import CHATML
from stoker.data.tokenise import TextCodec
from stoker.errors import UserError

CodecOf = Callable[..., TextCodec]


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def test_templates_by_name_and_by_file(codec: TextCodec, tmp_path: Path) -> None:
    assert codec.for_template("chatml", tmp_path).template.source == CHATML
    assert codec.for_template("auto", tmp_path).fingerprint == codec.fingerprint
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    mine = codec.for_template("mine.jinja", tmp_path)
    assert mine.template.render(chat("x")["messages"]) == "x"
    assert mine.fingerprint != codec.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chatlm", None, "there is no chat template 'chatlm'; write one of auto, chatml, plain, none"),
        ("bad.jinja", b"{% if %}", r"bad.jinja: the chat template is not valid Jinja.*line 1"),
        ("bad.jinja", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_wrong_template_is_the_users_to_mend(
    codec: TextCodec, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        codec.for_template(name, tmp_path)


def test_the_tokenizers_own_template_may_be_wrong_too(codec_of: CodecOf, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not valid Jinja"):
        codec_of("{% for %}").for_template("auto", tmp_path)


def test_regex_is_what_the_tokenizers_library_takes() -> None:
    """The patterns that words are parted by are ones that it compiles."""
    from stoker.data.patterns import PATTERNS

    for pattern in PATTERNS:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        assert [word for word, _ in split.pre_tokenize_str("It's 1 fox")][:2] == ["It", "'s"]
