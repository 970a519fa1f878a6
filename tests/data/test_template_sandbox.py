"""Chat templates that would take all time or memory end with one clear error; honest ones give what they gave."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.data.corpus import open_corpus
from stoker.data.templates import template_sandbox
from stoker.data.templates.chat_template import ChatTemplate
from stoker.data.templates.template_environment import TemplateRefused
from stoker.data.text_codec import TextCodec
from stoker.errors import LONGEST_REASON, UserError
from stoker.job import load_job

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
MEMORY = "takes more than 2 GiB of memory"
TIME = "does not come to an end"
DOUBLES = "{% set ns = namespace(x=M) %}{% for i in range(99) %}{% set ns.x = ns.x | replace('H', ns.x) %}{% endfor %}"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates get a tenth of the time, in a process of their own."""
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.3)
    monkeypatch.setattr(template_sandbox, "_children", {})


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
        ("{{ (messages | length) ** 9999999999 }}", TIME),
        ("{{ 'x' * 9999999999 }}", MEMORY),
        ("{% set x = messages[0].content * 9999999999 %}", MEMORY),
        ("{{ messages[0].content | center(9999999999) }}", MEMORY),
        ("{{ '%9999999999d' % 1 }}", MEMORY),
        ("{{ messages[0].content * 999999 }}", "writes 1,999,998 characters, which is more than"),
        (DOUBLES.replace("M", "messages[0].content * 99999"), MEMORY),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_a_template_without_bounds_is_an_error(template: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        ChatTemplate(template).render(TURNS)
    (problem,) = caught.value.problems
    assert problem.message.startswith("the chat template ")
    assert "data[].template" in problem.suggestion
    assert ChatTemplate("{{ messages[1].content }}!").render(TURNS) == "Ho!"  # in a new process


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ messages[0].content }}{{ '\\ud800' }}", "writes half a surrogate pair"),
        ("{# " + "x" * (1 << 20) + " #}", "is longer than 1,048,576 characters"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error(template: str, what: str) -> None:
    with pytest.raises(UserError, match=f"the chat template {what}; see data"):
        ChatTemplate(template).render(TURNS)


def test_the_reason_of_a_template_is_short() -> None:
    with pytest.raises(TemplateRefused) as caught:
        ChatTemplate("{{ raise_exception('x' * 10000) }}").render(TURNS)
    assert str(caught.value) == "x" * LONGEST_REASON


@pytest.mark.usefixtures("hasty")
def test_time_is_counted_by_the_rendering() -> None:
    """Many honest renderings take longer together than a single one may."""
    slow = ChatTemplate("{% for i in range(9000) %}{{ i }}{% endfor %}")
    began = os.times().children_user
    for _ in range(300):
        slow.render(TURNS)
    template_sandbox._children[os.getpid()].close()
    assert os.times().children_user - began > template_sandbox.SECONDS


def test_renderings_do_not_save_up_time() -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        for _ in range(1000):
            template_sandbox.charge_render_time(TURNS, None)
        left, _ = signal.getitimer(signal.ITIMER_PROF)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert template_sandbox.SECONDS / 2 < left < template_sandbox.SECONDS + 0.1


def test_the_process_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(template_sandbox, "_children", {})
    Path("json.py").write_text("open('ran', 'w')")
    assert ChatTemplate("{{ messages[0].content }}!").render(TURNS) == "Hi!"
    template_sandbox._children[os.getpid()].close()
    assert not Path("ran").exists()


def test_threads_share_the_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}!")
    found: list[str] = []

    def body(i: int) -> None:
        found.extend(template.render([{"role": "user", "content": str(i)}]) for _ in range(20))

    threads = [threading.Thread(target=body, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(f"{i}!" for i in range(4) for _ in range(20))


def test_what_a_template_says_comes_back() -> None:
    with pytest.raises(TemplateRefused, match="no such role"):
        ChatTemplate("{{ raise_exception('no such role') }}").render(TURNS)
    with pytest.raises(UserError, match="No filter named 'nofilter'"):
        ChatTemplate("{{ 1 | nofilter }}").render(TURNS)
    deep = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    with pytest.raises(UserError, match="nested too deeply"):
        ChatTemplate(deep).render(TURNS)


@pytest.mark.usefixtures("hasty")
def test_data_with_such_a_template_is_refused_at_its_key(
    codec_of: Callable[..., TextCodec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text("".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(600)))
    Path("job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: my.jsonl\nsteps: 10\n")
    loaded = load_job("job.yaml", [])
    codec = codec_of("{% if messages | length == 2 %}{{ 'x' * 9999999999 }}{% endif %}")
    with pytest.raises(UserError, match=MEMORY) as caught:
        open_corpus(loaded.job, codec, seq_len=64, loaded=loaded)
    assert str(caught.value).startswith("job.yaml:3:1: the chat template")
