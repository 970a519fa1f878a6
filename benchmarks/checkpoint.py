"""What a checkpoint costs: saved with training standing still against saved in the background, and from memory.

    python benchmarks/checkpoint.py [--models tiny,smollm2-135m] [--rounds 5] [--folder FOLDER] [--json]

Trains a model of random weights for a few steps with AdamW in float32, as `stoker.train` does, and saves its state
(weights and both moments) after each: with training standing still, on the disk and with checksums; in the background,
where the stall is a copy; and as a copy in memory only. PyTorch's own `dcp.save` and `dcp.async_save` of the same state
stand beside them. Every step between two saves is timed as well: what is written in the background slows it.
Then the state is restored, from the disk with its checksums verified, and from memory. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from stoker.checkpoint.chunks import Chunk
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.retention import Keep
from stoker.checkpoint.saver import Saver
from stoker.checkpoint.snapshots import Snapshots
from stoker.checkpoint.state import Saved, State
from stoker.runs.shared_memory import shared_memory

MODELS = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 192, "vocab_size": 4096},
    "smollm2-135m": {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152},
}
ROWS, TOKENS = 1, 128  # of a step: a small one, which is the harder case for a stall
GIB = 2**30
NEWEST = Keep(1)


class Training:
    """A model, its optimizer, and steps of it."""

    def __init__(self, shape: dict[str, int]) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(0)
        heads = shape["hidden_size"] // 64 or 1
        config = LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=1, tie_word_embeddings=True)
        self.model = AutoModelForCausalLM.from_config(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._ids = torch.randint(shape["vocab_size"], (ROWS, TOKENS))
        self.steps = 0

    def step(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(input_ids=self._ids, labels=self._ids).loss.backward()
        self.optimizer.step()
        self.steps += 1
        return time.perf_counter() - begin

    def tensors(self) -> dict[str, torch.Tensor]:
        held = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for moment, value in self.optimizer.state[parameter].items():
                held[f"optimizer/{name}/{moment}"] = value
        return held

    def state(self) -> State:
        return State(self.steps, self.tensors(), {"progress": {"step": self.steps}})

    def places(self, saved: dict[str, Saved]) -> dict[str, list[Chunk]]:
        return {name: [Chunk.whole(tensor)] for name, tensor in self.tensors().items()}


def median_of(rounds: int, training: Training, act: Callable[[], float]) -> tuple[float, float]:
    """Medians of what ``act`` returns after a step, and of the steps that follow on it."""
    found, steps = [], []
    training.step()
    for _ in range(rounds):
        found.append(act())
        steps.append(training.step())
    return statistics.median(found), statistics.median(steps)


def measure(shape: dict[str, int], base: Path, rounds: int) -> dict[str, float]:
    """All figures of a model, in seconds."""
    training = Training(shape)
    training.step()
    found: dict[str, float] = {"bytes": sum(tensor.nbytes for tensor in training.tensors().values())}
    found["step"] = statistics.median(training.step() for _ in range(3))
    store = Store(base / "checkpoints")

    def still() -> float:
        begin = time.perf_counter()
        saver.save(training.state(), NEWEST)
        return time.perf_counter() - begin

    with saving(store, base) as saver:
        still()  # what is agreed on once is
        found["still"], _ = median_of(rounds, training, still)
    with shared_memory(base), saving(store, base) as saver:
        totals: list[float] = []

        def background() -> float:
            """The stall; the checkpoint before has been written when it begins, as between real checkpoints."""
            saver.wait()
            totals.extend(outcome.seconds for outcome in saver.finished())
            begin = time.perf_counter()
            saver.save_in_background(training.state(), NEWEST)
            return time.perf_counter() - begin

        background(), training.step(), background()  # both copies have their room
        found["background"], found["step beside it"] = median_of(rounds, training, background)
        saver.wait()
        found["background, whole"] = statistics.median(totals)

        def remember() -> float:
            begin = time.perf_counter()
            saver.remember(training.state())
            return time.perf_counter() - begin

        found["memory"], _ = median_of(rounds, training, remember)
        begin = time.perf_counter()
        restored = saver.restore_newest(training.places)
        assert restored is not None and restored.where == "memory"
        found["restored from memory"] = time.perf_counter() - begin
        begin = time.perf_counter()
        store.restore(store.steps()[-1], training.places)
        found["restored from disk"] = time.perf_counter() - begin
    found.update(of_torch(training, base / "torch", rounds))
    return found


@contextmanager
def saving(store: Store, base: Path) -> Iterator[Saver]:
    with Saver(store, Snapshots(base), memory=1) as saver:
        yield saver


def of_torch(training: Training, folder: Path, rounds: int) -> dict[str, float]:
    """PyTorch's own functions, for the same state."""

    def synchronous() -> float:
        begin = time.perf_counter()
        dcp.save(training.tensors(), checkpoint_id=folder / f"still-{training.steps}")
        seconds = time.perf_counter() - begin
        shutil.rmtree(folder)
        return seconds

    def asynchronous() -> float:
        begin = time.perf_counter()
        future = dcp.async_save(training.tensors(), checkpoint_id=folder / f"beside-{training.steps}")
        seconds = time.perf_counter() - begin
        future.result()  # type: ignore[union-attr]
        shutil.rmtree(folder)
        return seconds

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        still, _ = median_of(rounds, training, synchronous)
        beside, _ = median_of(rounds, training, asynchronous)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
    return {"dcp.save": still, "dcp.async_save": beside}


def show(name: str, found: dict[str, float]) -> None:
    size = found["bytes"]
    print(f"\n{name}: {size / GIB:.3f} GiB of weights and moments, a step takes {found['step']:.3f} s")
    rows = ("still", "background", "memory", "dcp.save", "dcp.async_save")
    for row in rows:
        stall = found[row]
        share = f"1/{found['still'] / stall:.1f} of still, {stall / found['step']:.2f} of a step"
        print(f"  {row:<22} stall {stall:8.4f} s  {size / stall / GIB:6.2f} GiB/s   {share}")
    whole = found["background, whole"]
    print(f"  on the disk after      {whole:14.4f} s  {size / whole / GIB:6.2f} GiB/s")
    print(f"  a step beside it       {found['step beside it']:14.4f} s")
    for row in ("restored from disk", "restored from memory"):
        print(f"  {row:<22} {found[row]:14.4f} s  {size / found[row] / GIB:6.2f} GiB/s")


def main() -> None:
    """Measures the models and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; by default for temporary files")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    answers: dict[str, Any] = {}
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            answers[name] = measure(MODELS[name], Path(temporary), arguments.rounds)
        if not arguments.json:
            show(name, answers[name])
    if arguments.json:
        print(json.dumps(answers, indent=2))
    else:
        machine = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
        print(f"\n{platform.processor() or platform.machine()}, {machine}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
