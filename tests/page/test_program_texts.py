"""English texts that the page shows are there in Chinese: those of the source, and problems of jobs as they come."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from program_texts import forms, normal

import stoker
from stoker.errors import UserError
from stoker.job.document.yaml_document import parse_document
from stoker.job.load_job import check_document
from stoker.page.app import STATIC
from stoker.page.jobs.job_keys import job_keys

SOURCE = Path(stoker.__file__).parent
SHOWN = (  # modules whose texts come to the page: problems of a job, of its data, plan and model; reasons; meanings
    *(
        "job/*.py",
        "job/document/*.py",
        "job/keys/*.py",
        "job/resolution/*.py",
        "job/blocks/*.py",
        "job/conflicts/*.py",
        "job/targets/*.py",
        "data/**/*.py",
        "train/tasks/*.py",
        "train/rollouts/*_block.py",
        "train/rollouts/*_conflicts.py",
    ),
    *(
        "plan/answer/*.py",
        "plan/planned_job.py",
        "plan/run_correction.py",
        "plan/shapes/*.py",
        "launch/auto_parallel.py",
    ),
    *(
        "cli/preflight.py",
        "cli/commands/data.py",
        "cli/commands/plan.py",
        "parallel/**/*.py",
        "generate/*.py",
        "serve/**/*.py",
    ),
    *("models/*.py", "models/attention/*.py", "models/tokenizers/*.py", "models/tuning/*.py"),
    *(
        "cli/commands/serve.py",
        "node_cache/*.py",
        "hardware/machines/cluster_file.py",
        "evaluate/row_losses.py",
        "checkpoint/load_run.py",
    ),
    *("data/ranking/ranking_block.py", "train/ranking/*_conflicts.py", "train/ranking/prepare_ranking.py"),
    *("train/ranking/ranking_tables.py", "train/rollouts/open_policy.py", "train/rollouts/open_critic.py"),
    *("train/rollouts/rewards.py", "scoring/scorers.py", "scoring/python_scorer.py"),
    *("scoring/json_schema.py", "scoring/patterns.py", "sockets.py"),
)
ELSEWHERE = (  # of those, what is written into files, drawn for terminals, or read from other programs
    *("job/recipes.py", "plan/answer/picture.py", "plan/answer/terminal_picture.py", "serve/metrics.py"),
    *("data/templates/chat_template.py", "data/offline/arithmetic_rows.py"),
    *("job/task_spec.py", "job/layout.py", "job/changed_keys.py", "serve/openai/sse.py"),
    "data/ranking/log_row_view.py",
)
CODE = re.compile(  # commands, templates of chats, citations, sums of keys, names of keys in other tools
    r"^(pip|python|stoker|chat|eval|export|serve|find|one|from|gpu\d|module load|Bearer|--on|X1 --api|VLLM_API_KEY|"
    r"listening|tokens of the prompt|model said) |\{%|et al\.|^(\w+ )*\w+_\w+( \w+)*$|^[\w./() ]+ x [\w./() ]+ = "
)
APART = json.loads((Path(__file__).parent / "texts_apart.json").read_text(encoding="utf-8"))
KEPT = re.compile(
    r"--[\w-]+( average)?|in-batch-softmax|`[^`]*`|\"[^\"]*\"|'[^']*'|[\w./-]*[._:=/][\w./:=-]*|\{[^}]*\}|\[[^]]*\]"
)
ENGLISH = re.compile(r"\b(an?|the|or|and|of|is|are|to|in|with|not|no|it|its|by|for|on|at|be|from|as|than|has|have)\b")
JOB: dict[str, Any] = {"task": "sft", "model": "llama-3m", "data": "x.jsonl", "steps": 5}
BLOCKS = ("reward", "dpo", "ppo", "grpo", "ranking", "module")  # of tasks of these names

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="the page's own modules run in node")


@cache
def table() -> dict[str, str]:
    found: dict[str, str] = json.loads((STATIC / "texts.zh.json").read_text(encoding="utf-8"))
    return found


def modules() -> list[Path]:
    every = {path for pattern in SHOWN for path in SOURCE.glob(pattern)}
    return sorted(every - {SOURCE / name for name in ELSEWHERE})


def in_chinese(texts: list[str]) -> list[str | None]:
    """What the page says for each text; None where it has nothing."""
    command = ["node", str(Path(__file__).parent / "translated.mjs")]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    found: list[str | None] = json.loads(done.stdout)
    return found


def left_in_english(texts: list[str]) -> dict[str, str | None]:
    """Texts without Chinese, and those in whose Chinese English words are left."""
    return {
        text: said
        for text, said in zip(texts, in_chinese(texts), strict=True)
        if said is None or ENGLISH.search(KEPT.sub(" ", said))
    }


def filled(form: str) -> str:
    """A form with a word for each value."""
    numbers = iter(range(1, 100))
    return re.sub(r"\{(s?)\}", lambda hole: "" if hole[1] else f"X{next(numbers)}", form)


@needs_node
def test_every_text_of_the_source_is_said_in_chinese() -> None:
    places = {filled(text): f"{path.name}:{line}" for path in modules() for line, text in forms(path)}
    texts = [text for text in places if not CODE.search(text) and text not in APART["not shown"]]
    assert len(texts) > 1000
    left = {f"{places[text]}: {text}": said for text, said in left_in_english(texts).items()}
    assert not left, f"write their Chinese into texts.zh.json: {json.dumps(left, indent=1, ensure_ascii=False)}"


@needs_node
def test_meanings_and_reasons_of_keys_are_said_in_chinese() -> None:
    texts = sorted({key[part] for key in job_keys() for part in ("meaning", "reason")} - {""})
    assert len(texts) > 400 and not left_in_english(texts)


def put(path: str, value: Any) -> dict[str, Any]:
    """A job with a key."""
    block, *_ = path.split(".")
    job = copy.deepcopy({**JOB, "task": block if block in BLOCKS else JOB["task"]})
    holder: Any = job
    *outer, last = path.split(".")
    for depth, name in enumerate(outer):
        if depth == 0 and name == "data":
            holder[name] = [{"path": "x.jsonl"}]
            holder = holder[name][0]
            continue
        if not isinstance(holder.get(name), dict):
            holder[name] = {"name": "llama-3m"} if name == "model" else {}
        holder = holder[name]
    holder[last] = value
    return job


def said_of(job: dict[str, Any]) -> set[str]:
    """Problems of a job with what to do about them, or the reasons of its values."""
    try:
        found = check_document(parse_document(yaml.safe_dump(job), file="job.yaml"))
    except UserError as error:
        return {text for problem in error.problems for text in (problem.message, problem.suggestion) if text}
    return {origin.why for origin in found.origins.values()} - {""}


@needs_node
@pytest.mark.slow
def test_problems_of_jobs_are_said_in_chinese() -> None:
    jobs = [put(key["path"], "some words") for key in job_keys()]
    jobs += [put(f"{key['path']}x", 1) for key in job_keys()[::7]]
    layouts = (
        {"tensor": 2, "data": 2},
        {"pipeline": 4},
        {"shard": "zero3"},
        {"expert": 3},
        {"data": 3, "devices": [0]},
    )
    uneven = {"batch": 7, "micro_batch": 2, "accumulation": 3}
    jobs += [{**JOB, "parallel": layout, "train": uneven} for layout in layouts]
    jobs += [{**JOB, name: 1} for name in ("learning_rate", "lora_r", "fp16", "do_train", "stage", "zzz", "rank")]
    jobs += [{**JOB, "task": task} for task in ("pretrain", *BLOCKS)]
    texts = sorted({text for job in jobs for text in said_of(job) if " " in text and not CODE.search(text)})
    assert len(texts) > 700
    assert not left_in_english(texts)


def test_chinese_has_the_values_of_its_form() -> None:
    for english, chinese in table().items():
        values = set(re.findall(r"\{(\w+)\}", english)) - {"s"}
        assert set(re.findall(r"\{(\w+)~?\}", chinese)) == values, english


def test_the_table_is_sorted() -> None:
    assert list(table()) == sorted(table())


@pytest.mark.slow
def test_no_chinese_is_left_of_texts_that_are_gone() -> None:
    known = {normal(text) for path in (*modules(), *SOURCE.glob("page/**/*.py")) for _, text in forms(path)}
    of_keys = {normal(key[part]) for key in job_keys() for part in ("meaning", "reason")}
    joined = {normal(text) for text in APART["joined from several"]}
    left = [form for form in table() if normal(form) not in known | of_keys | joined and not _is_literal(form)]
    assert not left, left


def _is_literal(form: str) -> bool:
    """Whether the source has a form's text, where it is not written as one text for people."""
    return all(part in _all_source() for part in re.split(r"\{\w+\}", form) if part.strip(" ,.:;"))


@cache
def _all_source() -> str:
    every = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(every)).replace('\\"', '"').replace("\\n", "\n")


@needs_node
@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("job.yaml:3:1: unknown key `trian.lr`; write `train`", "job.yaml:3:1：未知的键 `trian.lr`；请写 `train`"),
        ("`a` must be text, not nothing", "`a` 必须是文本，而不是空"),
        ("write text or stop", "请写 text 或 stop"),  # words that are typed
        ("`a` must be one of text, stop, not 'one or two'", "`a` 必须是 text, stop 之一，而不是 'one or two'"),
        (
            "does not fit: needs up to 9.0 GiB (mostly weights), available 2 GiB",
            "放不下：最多需要 9.0 GiB（主要是权重），可用 2 GiB",
        ),
        ("a library said something else", None),
        ("not valid JSON: a library said so", "不是有效的 JSON：a library said so"),
    ],
)
def test_texts_are_made_of_texts(english: str, chinese: str | None) -> None:
    assert in_chinese([english]) == [chinese]
