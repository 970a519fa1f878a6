"""What a task states lies in its own file: no other file asks which task a job is of."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.job.resolution.batch_solver import DEFAULT_BATCH
from stoker.job.task_spec import TASKS

PACKAGE = Path(stoker.__file__).parent


def which_task(tree: ast.AST) -> list[str]:
    """The comparisons and match statements of a module that name a task."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Match):
            inside = [node] if isinstance(node, ast.Compare) else [node.subject, *(c.pattern for c in node.cases)]
            parts = [part for outer in inside for part in ast.walk(outer)]
            named = {part.value for part in parts if isinstance(part, ast.Constant)} & TASKS.keys()
            if named and any(
                "task" in (getattr(p, "attr", ""), getattr(p, "id", ""), getattr(p, "value", "")) for p in parts
            ):
                found.append(ast.unparse(node).splitlines()[0])
    return found


@pytest.mark.parametrize(
    "code",
    ["job.task == 'sft'", "task != 'module'", "view.value('task') in ('module', 'sft')", "base['task'] == 'pretrain'"],
)
def test_comparisons_with_a_task_are_seen(code: str) -> None:
    assert which_task(ast.parse(code)) == [code]
    assert which_task(ast.parse("match job.task:\n case 'sft':\n  pass")) == ["match job.task:"]
    assert not which_task(ast.parse("job.task == spec.name or kind == 'module'"))


def test_no_other_file_asks_which_task_a_job_is_of() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "train" / "tasks"]
    found = {str(path): asked for path in files if (asked := which_task(ast.parse(path.read_text())))}
    assert len(files) > 100 and not found


def test_a_file_of_the_folder_is_a_task() -> None:
    files = sorted(path.stem for path in (PACKAGE / "train" / "tasks").glob("*.py") if path.stem != "__init__")
    assert files == sorted(TASKS) and [task.name for task in TASKS.values()] == list(TASKS)
    assert TASKS["pretrain"].batch > DEFAULT_BATCH == TASKS["sft"].batch


def test_knowing_the_tasks_takes_no_torch() -> None:
    code = "import sys, stoker.job.task_spec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("first", ["stoker.train.tasks.module", "stoker.train.tasks", "stoker.job.schema"])
def test_whatever_is_imported_first_finds_all_tasks(first: str) -> None:
    code = f"import {first}; from stoker.job.task_spec import TASKS; print(*TASKS)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == list(TASKS)
