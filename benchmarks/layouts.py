"""Layouts on two processes against one process with two threads, and Stoker's loop against a bare one.

    python benchmarks/layouts.py [--layouts one ddp zero2 zero3 tensor pipeline] [--steps 8] [--rows 8] [--length 128]
                                 [--micro-batch 2] [--model smollm2-135m] [--json FILE]

Every layout trains all weights of SmolLM2-135M in float32 on a CPU, on the same rows: one process with two threads,
or two processes with one thread each, so that all have the same two cores. A step of Stoker's loop, from the end of
one step to the end of the next, alternates with one of a bare loop in the same processes: the same model spread by
`stoker.parallel`, torch's AdamW, and nothing else: no data pipeline, no counting, no metrics. Printed are medians,
after two steps of each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from stoker.cli.output.quiet_libraries import quiet_libraries
from stoker.errors import UserError
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.attention.collate import Inputs
from stoker.parallel.data_parallel.shard import micro_batch
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.train.distributed import Distributed
from stoker.train.hooks import Hook
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.run import train_run

LAYOUTS = {
    "one": "{data: 1}",
    "ddp": "{data: 2}",
    "zero2": "{data: 2, shard: zero2}",
    "zero3": "{data: 2, shard: zero3}",
    "tensor": "{tensor: 2, sequence: false}",
    "pipeline": "{pipeline: 2, schedule: 1f1b}",
}
WARM, LR, CORES = 2, 1e-5, 2


@dataclass
class Result:
    """Seconds of a step under a layout, and processor seconds of its first process, medians."""

    layout: str
    processes: int
    threads: int
    stoker: float
    bare: float
    stoker_cpu: float
    bare_cpu: float
    tokens: int
    loss: float

    @property
    def overhead(self) -> float:
        """What Stoker's loop adds to the bare one, as a share of it."""
        return self.stoker / self.bare - 1

    @property
    def cpu_overhead(self) -> float:
        """The same in processor time, which other programs on the machine change less."""
        return self.stoker_cpu / self.bare_cpu - 1


class Bare:
    """A training loop of this model without anything around it, over rows that are laid out already."""

    def __init__(self, prepared: Prepared, mesh: Mesh | None, rows: int, micro: int) -> None:
        self.task, self.engine = prepared.task, prepared.engine
        first, last = self.engine.share(0, rows, rows)
        parts = [part for i in range(first, last, micro) for part in self.task.parts(i, min(i + micro, last))]
        self.parts = [part.to(prepared.device.torch) for part in parts]
        self.targets = sum(part.targets for part in self.parts) * (mesh.layout.data if mesh else 1)
        self.layout = mesh.layout if mesh else None
        self.trained = [p for p in self.task.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, weight_decay=0.0, fused=True)

    def step(self) -> None:
        """Forward and backward passes, clipping at 1, and the optimizer."""
        together = self.engine if isinstance(self.engine, Distributed) else None
        if together is not None and together._pipeline is not None:
            rows = [part.inputs for part in self.parts]
            assert all(isinstance(row, Inputs) for row in rows)
            together._pipeline.train(rows, 1.0 / self.targets)  # type: ignore[arg-type]
        else:
            root = together._root if together is not None else None
            for number, part in enumerate(self.parts):
                with self._synchronising(root, last=number == len(self.parts) - 1), self.task.around(part):
                    (self.task.loss(part).total / self.targets).backward()
        if together is not None:
            together._gradients.finish()
            together._gradients.clip(together._gradients.norm(), 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _synchronising(self, root: torch.nn.Module | None, *, last: bool) -> AbstractContextManager[None]:
        if isinstance(root, FSDPModule):
            assert self.layout is not None
            return micro_batch(root, self.layout, last=last)
        if isinstance(root, DistributedDataParallel) and not last:
            return root.no_sync()
        return nullcontext()


def measure(name: str, job_file: str, threads: int, rows: int, micro: int) -> Result:
    """One layout, on each of its processes."""
    quiet_libraries()
    torch.set_num_threads(threads)
    path = Path(job_file)
    loaded = load_job(path)
    layout = layout_of(loaded.job)
    mesh = None if layout.one_process else Mesh(layout, torch.device("cpu"))
    prepared = prepare(loaded, path.parent, mesh=mesh)
    bare = Bare(prepared, mesh, rows, micro)
    stoker_steps: list[tuple[float, float]] = []
    bare_steps: list[tuple[float, float]] = []
    seen: list[StepMetrics] = []
    ended = clocks()

    def on_step(metrics: StepMetrics) -> None:
        nonlocal ended
        begin = clocks()
        stoker_steps.append(since(ended, begin))
        seen.append(metrics)
        bare.step()
        ended = clocks()
        bare_steps.append(since(begin, ended))

    folder = RunFolder(path.parent / str(loaded.job.output))
    folder.path.mkdir(exist_ok=True)
    train_run(prepared, folder, path.parent, quiet=True, hooks=[Hook(after_step=on_step)])
    return Result(
        name,
        layout.world,
        threads,
        *(
            statistics.median(step[clock] for step in steps[WARM:])
            for clock in (0, 1)
            for steps in (stoker_steps, bare_steps)
        ),
        seen[-1].tokens,
        seen[0].loss,
    )


def clocks() -> tuple[float, float]:
    """Now, by the wall's clock and by this process' own."""
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Seconds by both clocks."""
    return end[0] - begin[0], end[1] - begin[1]


def job_file(folder: Path, name: str, arguments: argparse.Namespace) -> Path:
    """A job under a layout."""
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: pretrain\nmodel: {arguments.model}\ndata: [{{path: {folder}/rows.jsonl, too_long: cut}}]\n"
        f"steps: {arguments.steps + WARM}\noutput: {folder}/{name}\nevaluate: {{fraction: 0.0}}\n"
        f"checkpoint: {{every: 100000, best: false}}\nparallel: {LAYOUTS[name]}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, weight_decay: 0.0, clip: 1.0, precision: fp32, "
        f"pack: false, seq_len: {arguments.length + 1}, "
        f"batch: {arguments.rows}, micro_batch: {arguments.micro_batch}}}\n"
    )
    return path


def write_rows(path: Path, count: int, length: int) -> None:
    """Rows that begin differently and are longer than is asked for, so that all are cut to one length."""
    numbers = random.Random(0)
    rows = (" ".join(str(numbers.randrange(10**4)) for _ in range(length)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def main() -> None:
    """Runs the layouts one after the other in one pool of processes, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=8, help="that are measured")
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--length", type=int, default=128, help="of a row, in tokens")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a forward pass")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary, Pool(CORES) as pool:
        folder = Path(temporary)
        write_rows(folder / "rows.jsonl", arguments.rows * (arguments.steps + WARM), arguments.length)
        for name in arguments.layouts:
            world = 1 if name == "one" else CORES
            path = str(job_file(folder, name, arguments))
            asked = (name, path, CORES // world, arguments.rows, arguments.micro_batch)
            try:
                results.append(pool.run(measure, *asked, world=world, timeout=3600)[0])
            except UserError as error:  # the model cannot be spread so
                print(f"{name:<10} cannot be: {error.problems[0].message}", flush=True)
            else:
                print_line(results[-1], results[0])
    if arguments.json:
        found = [
            {**asdict(result), "overhead": result.overhead, "cpu_overhead": result.cpu_overhead} for result in results
        ]
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def print_line(result: Result, first: Result) -> None:
    """One layout, against the first of the table."""
    if result is first:
        heads = f"{'layout':<10} {'processes':>9} {'step':>9} {'to first':>9} {'bare':>9}"
        print(f"{heads} {'overhead':>9} {'of CPU':>8} {'first loss':>11}")
    overheads = f"{result.overhead:>9.1%} {result.cpu_overhead:>8.1%}"
    ratios = f"{result.stoker / first.stoker:>9.2f} {result.bare:>8.3f}s {overheads}"
    processes = f"{result.processes} x {result.threads}"
    print(f"{result.layout:<10} {processes:>9} {result.stoker:>8.3f}s {ratios} {result.loss:>11.6f}", flush=True)


if __name__ == "__main__":
    main()
