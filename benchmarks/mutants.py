"""Mutations: a line of the source is changed in a copy, and `stoker verify` of a small job has to tell, or a test.

make mutants                                                     # all of mutations.yaml
python benchmarks/mutants.py --only clamp key-heads-even         # some
python benchmarks/mutants.py --jobs 4 --results killed.jsonl     # four at a time; goes on where it was stopped

A mutation is killed when `stoker verify` does not pass: it names what differs, or the run breaks. A mutation of a
policy's formulas, which have no reference there, names a file of tests instead, and is killed when they fail. Ends with
1 where fewer than 95 % are killed, a survivor has no reason, or a job or test does not pass on the unchanged source.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
TESTS = "tests/"  # what begins so is a file of tests, not a job
WANTED = 0.95  # of the mutations
LIMIT = 300.0  # seconds of one of them
POLL = 0.05  # seconds
HEAVY = ("torch", "transformers", "peft", "pytest", "torch.distributed.fsdp", "torch.distributed.pipelining")
UNCHANGED = "unchanged"
ORIGINAL = "original"  # the folder of the source as it was when this began
MODULE = """
import torch
from torch import nn

def data_of(seed, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > x[:, 1]).long())

build = lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))
loss = nn.functional.cross_entropy
data = lambda: data_of(0, 30)
held_out = lambda: data_of(1, 20)
"""


@dataclass(frozen=True)
class Mutation:
    """One change of the source.

    Attributes:
        file: below ``src/stoker``.
        old, new: ``old`` occurs once in the file.
        why: what would be trained otherwise.
        job: by which `stoker verify` should tell.
        test: a file of tests, or one of its tests, that should tell instead.
        harmless: why it cannot matter, where that is so.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    job: str = ""
    test: str = ""
    harmless: str = ""

    @property
    def by(self) -> str:
        """The job or the file of tests."""
        return self.test or self.job


@dataclass(frozen=True)
class Result:
    """What came of a mutation. ``reason``: of its death."""

    name: str
    killed: bool
    reason: str
    seconds: float


@dataclass(frozen=True)
class Catalogue:
    """What mutations.yaml says."""

    models: dict[str, dict[str, Any]]
    jobs: dict[str, str]
    mutations: list[Mutation]

    def problems(self, source: Path) -> list[str]:
        """What is wrong with it, beside the source as it is."""
        found = []
        names = [mutation.name for mutation in self.mutations]
        found += [f"{name}: the name is taken twice" for name in sorted({n for n in names if names.count(n) > 1})]
        for mutation in self.mutations:
            path = source / "stoker" / mutation.file
            times = path.read_text(encoding="utf-8").count(mutation.old) if path.is_file() else 0
            if times != 1:
                found.append(f"{mutation.name}: {mutation.file} has {mutation.old!r} {times} times, and not once")
            if mutation.by not in self.jobs and not _is_test(mutation.by):
                found.append(f"{mutation.name}: there is no job or test {mutation.by!r}")
        return found


def read_catalogue(path: Path = HERE / "mutations.yaml") -> Catalogue:
    """The mutations and their jobs."""
    content = YAML(typ="safe", pure=True).load(path)
    return Catalogue(content["models"], content["jobs"], [Mutation(**entry) for entry in content["mutations"]])


def _is_test(by: str) -> bool:
    return by.startswith(TESTS) and (HERE.parent / by.partition("::")[0]).is_file()


def write_jobs(catalogue: Catalogue, folder: Path) -> None:
    """The jobs with their models' configurations; `stoker verify` reads no weights and no data."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "</s>": 1}, [])), eos_token="</s>"
    )
    for name, values in catalogue.models.items():
        AutoConfig.for_model(**values).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        save_file({"none": torch.zeros(1)}, folder / name / "model.safetensors")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    (folder / "net.py").write_text(MODULE, encoding="utf-8")
    for name, text in catalogue.jobs.items():
        data = "" if "module:" in text else "data: rows.jsonl\n"
        (folder / f"{name}.yaml").write_text(data + text, encoding="utf-8")


@dataclass(frozen=True)
class Running:
    """A `stoker verify` or a test that has been started."""

    name: str
    pid: int
    began: float
    folder: TemporaryDirectory[str]

    @property
    def output(self) -> Path:
        return Path(self.folder.name) / "output"


def start(work: Mutation | str, jobs: Path) -> Running:
    """Runs `stoker verify` or a test with a mutation, or with the source as it is, where it must pass.

    It is forked from this process, which has loaded the libraries.
    """
    mutation = work if isinstance(work, Mutation) else None
    by = mutation.by if mutation else str(work)
    folder = TemporaryDirectory(prefix="stoker-mutant-")
    source = mutated(mutation, jobs / ORIGINAL, Path(folder.name))
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _child(by if _is_test(by) else jobs / f"{by}.yaml", source, Path(folder.name))
    return Running(name_of(work), pid, began, folder)


def name_of(work: Mutation | str) -> str:
    """The name under which its result is kept."""
    return work.name if isinstance(work, Mutation) else f"{UNCHANGED} {work}"


def ended(running: Running) -> Result | None:
    """What came of it; None while it goes on."""
    seconds = time.perf_counter() - running.began
    pid, status = os.waitpid(running.pid, os.WNOHANG)
    if not pid and seconds < LIMIT:
        return None
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)  # what it has left: it leads a session
    if not pid:
        os.waitpid(running.pid, 0)
    code = os.waitstatus_to_exitcode(status) if pid else None
    output = running.output.read_text(encoding="utf-8", errors="replace") if running.output.exists() else ""
    with suppress(OSError):
        running.folder.cleanup()
    return judged(running.name, code, output, seconds)


def _child(by: Path | str, source: Path, scratch: Path) -> None:
    """Never returns."""
    try:
        file = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.chdir(by.parent if isinstance(by, Path) else HERE.parent)
        sys.path.insert(0, str(source))
        os.environ.update(PYTHONPATH=str(source), STOKER_CACHE=str(scratch / "cache"), OMP_NUM_THREADS="1")
        # What runs is forked from here instead of from a server that loads the libraries another time.
        forking = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: forking  # type: ignore[assignment]
        forkserver.ensure_running = lambda: None
        if isinstance(by, Path):
            code = int(importlib.import_module("stoker.cli.main").main(["verify", by.name, "--json", "--fail-fast"]))
        else:
            code = int(importlib.import_module("pytest").main([by, "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]))
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 70
    sys.stdout.flush()
    os._exit(code)


def judged(name: str, code: int | None, output: str, seconds: float) -> Result:
    """What the exit of ``stoker verify`` or of a test says."""
    if code is None:
        return Result(name, True, f"it did not end within {LIMIT:g} s", seconds)
    lines = [line for line in output.splitlines() if line.startswith('{"passed"')]
    if lines:
        found = json.loads(lines[-1])
        reasons = [layout["reason"] for layout in found["layouts"] if layout["reason"]]
        return Result(name, not found["passed"], "; ".join(reasons), seconds)
    last = [line for line in output.splitlines() if line.strip()][-1:] or ["nothing was printed"]
    return Result(name, code != 0, f"exit code {code}: {last[0].strip()}", seconds)


def mutated(mutation: Mutation | None, source: Path, folder: Path) -> Path:
    """A copy of a source with a mutation."""
    copy = folder / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    if mutation is not None:
        path = copy / "stoker" / mutation.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
    return copy


def line_of(result: Result, mutation: Mutation | None) -> str:
    """The result as a line of the report."""
    if mutation is None:
        return f"{'FAILS' if result.killed else 'passes':<9} {result.name:<30} {result.seconds:5.1f} s  {result.reason}"
    word = "killed" if result.killed else "harmless" if mutation.harmless else "SURVIVED"
    why = result.reason if result.killed else mutation.harmless or mutation.why
    return f"{word:<9} {result.name:<30} {result.seconds:5.1f} s  {why}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines: what is in it is not tried again")
    arguments = parser.parse_args()
    catalogue = read_catalogue()
    if problems := catalogue.problems(SOURCE):
        print("mutations.yaml does not fit the source:", *problems, sep="\n  ")
        return 1
    names = {mutation.name for mutation in catalogue.mutations}
    if unknown := set(arguments.only or ()) - names:
        print(f"there is no mutation {', '.join(sorted(unknown))}")
        return 2
    chosen = [m for m in catalogue.mutations if not arguments.only or m.name in arguments.only]
    known: dict[str, Result] = {}
    if arguments.results and arguments.results.exists():
        lines = arguments.results.read_text(encoding="utf-8").splitlines()
        known = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}
    for module in HEAVY:
        importlib.import_module(module)
    work: list[Mutation | str] = [*dict.fromkeys(m.by for m in chosen), *chosen]
    work = [each for each in work if name_of(each) not in known]
    by_name = {mutation.name: mutation for mutation in chosen}
    with TemporaryDirectory(prefix="stoker-mutants-") as folder:
        jobs = Path(folder)
        write_jobs(catalogue, jobs)
        shutil.copytree(SOURCE, jobs / ORIGINAL)  # which may be edited meanwhile
        for result in _results(work, jobs, arguments.jobs):
            known[result.name] = result
            print(line_of(result, by_name.get(result.name)), flush=True)
            if arguments.results:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    return summary(chosen, known)


def _results(work: list[Mutation | str], jobs: Path, at_once: int) -> Iterator[Result]:
    """As they end, some at a time."""
    waiting, running = list(reversed(work)), list[Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(start(waiting.pop(), jobs))
        for each in list(running):
            result = ended(each)
            if result is not None:
                running.remove(each)
                yield result
        time.sleep(POLL)


def summary(chosen: list[Mutation], results: dict[str, Result]) -> int:
    """Prints what came of all; the exit code."""
    broken = [
        r.name.removeprefix(f"{UNCHANGED} ") for r in results.values() if r.name.startswith(UNCHANGED) and r.killed
    ]
    killed = [m for m in chosen if results[m.name].killed]
    survived = [m for m in chosen if not results[m.name].killed]
    share = len(killed) / len(chosen)
    slowest = max(results[m.name].seconds for m in chosen)
    print(f"\nkilled {len(killed)} of {len(chosen)} ({share:.1%}); the slowest took {slowest:.0f} s")
    for mutation in survived:
        print(
            f"  {'harmless' if mutation.harmless else 'SURVIVED'} {mutation.name}: {mutation.harmless or mutation.why}"
        )
    if broken:
        print(f"jobs and tests that fail on the unchanged source, so their mutations say nothing: {', '.join(broken)}")
    return int(share < WANTED or bool(broken) or any(not mutation.harmless for mutation in survived))


if __name__ == "__main__":
    sys.exit(main())
