"""The table of cells: every family tuned in every way, from a job file to an adapter that plain peft loads.

    make tune-matrix                                          # all of it, two cores, under ten minutes
    python benchmarks/tune_matrix.py llama gpt2 --to -        # some families, printed

Each family's model is tiny and random, and first trained whole on questions and answers. A cell is then a job that
teaches it to name the topic of a question: its held-out loss before and after, the bytes of its adapter, the largest
difference of its logits from those of plain transformers and peft on what was exported (and of the merged model, where
there is one), whether its greedy answers are the same, and whether a run that goes on from its middle checkpoint ends
in the same bits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stoker.checkpoint.export.adapter_export import save_adapter
from stoker.checkpoint.export.write_export import base_of, merged_model
from stoker.checkpoint.load_run import open_run
from stoker.cli.output.quiet_libraries import quiet_libraries
from stoker.data.sources import open_source
from stoker.data.tokenizers.train_tokenizer import learn_vocabulary
from stoker.job.blocks.source_block import SourceBlock
from stoker.job.load_job import load_job
from stoker.models.tuning.virtual_tokens import virtual_ids
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run
from stoker.verify.toy_config import ToyShape, shrunk

FAMILIES = ("gpt2", "bloom", "opt", "gpt_neo", "gptj", "gpt_neox", "llama", "glm", "glm4", "qwen3", "mistral")
# Each with a rate for a model this small.
METHODS: dict[str, tuple[str, float]] = {
    "lora": ("{method: lora, rank: 4}", 1e-2),
    "prefix": ("{method: prefix, tokens: 8}", 1e-2),
    "prompt": ("{method: prompt, tokens: 8}", 1e-1),
    "p-tuning": ("{method: p-tuning, tokens: 8}", 1e-2),
    "p-tuning v2": ("{method: p-tuning, tokens: 8, deep: true}", 1e-1),
}
ANSWERS = "{path: chatterbot-corpus, template: plain}"
TOPICS = "{path: chatterbot-corpus, template: plain, format: prompt, columns: {prompt: question, completion: topic}}"
BASE_STEPS, STEPS = 120, 40
VOCABULARY = 512
QUESTION = "What is your favorite book?"
JOB = """
task: sft
model: {{name: {model}}}
data: [{data}]
tune: {tune}
steps: {steps}
seed: 1
train: {{batch: 8, seq_len: 64, lr: {lr}}}
evaluate: {{fraction: 0.1, every: {steps}, rows: 64}}
checkpoint: {{every: {half}, keep: 5, best: false}}
output: {output}
"""


@dataclass(frozen=True)
class Cell:
    """What became of a family under a method.

    Attributes:
        before, after: held-out loss.
        bytes: of the adapter's file.
        reload, merged: largest difference of logits; None where nothing can be merged.
        answers: whether plain peft says the same.
        resumes: whether the second half of the run, done again, ends in the same bits.
    """

    family: str
    method: str
    before: float
    after: float
    bytes: int
    reload: float
    merged: float | None
    answers: bool
    resumes: bool
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether all is as it should be."""
        small = self.reload < 1e-4 and (self.merged is None or self.merged < 1e-3)
        return self.after < self.before and small and self.answers and self.resumes


def write_job(folder: Path, name: str, **values: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(JOB.format(output=folder / name, half=values["steps"] // 2, **values), encoding="utf-8")
    return path


def train(job: Path) -> RunFolder:
    loaded = load_job(job)
    folder = RunFolder(Path(str(loaded.job.output)))
    with folder.take():
        train_run(prepare(loaded, job.parent), folder, job.parent, quiet=True)
    return folder


def make_base(family: str, folder: Path) -> Path:
    """A small model of the family that knows questions and answers, as transformers saves it."""
    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "tokenizer")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2}
    full = AutoConfig.for_model(family)
    if getattr(full, "num_key_value_heads", None) is not None:
        full = AutoConfig.for_model(family, **sizes)
    config = shrunk(full, ToyShape(blocks=3))
    config.vocab_size = len(tokenizer)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = tokenizer.eos_token_id, None, None
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        if name in ("sliding_window", "window_size") and value:
            setattr(config, name, 128)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    job = write_job(folder, "base-run", model=folder / "random", data=ANSWERS, tune="full", steps=BASE_STEPS, lr=3e-3)
    train(job)
    tuned = open_run(str(folder / "base-run"), folder)
    merged_model(tuned.model).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder / "base"


@torch.no_grad()
def make_cell(family: str, method: str, base: Path, folder: Path) -> Cell:
    """One job, and what plain peft makes of its adapter."""
    begin = time.perf_counter()
    name = method.replace(" ", "-")
    tune, rate = METHODS[method]
    job = write_job(folder, name, model=base, data=TOPICS, tune=tune, steps=STEPS, lr=rate)
    with torch.enable_grad():
        run = train(job)
    losses = [event["loss"] for event in run.read_events() if event["event"] == "evaluated"]
    tuned = open_run(str(run.path), folder)
    adapter = folder / f"{name}-adapter"
    save_adapter(tuned.model, adapter, base_of(tuned, folder))
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = PeftModel.from_pretrained(plain, str(adapter)).eval()
    ids = torch.tensor([tuned.tokenizer(f"### Instruction:\n{QUESTION}\n\n### Response:\n")["input_ids"]])
    front = virtual_ids(tuned.model)
    mine = torch.tensor([[*front, *ids[0].tolist()]])
    logits = tuned.model(input_ids=mine).logits[:, -ids.shape[1] :]
    theirs = loaded(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -ids.shape[1] :]
    answers = [greedy(model, row) for model, row in ((tuned.model, mine), (loaded, ids))]
    merged = None
    if method == "lora":
        merged_model(tuned.model).save_pretrained(folder / f"{name}-merged")
        again = AutoModelForCausalLM.from_pretrained(folder / f"{name}-merged").eval()
        merged = float((again(input_ids=ids).logits - logits).abs().max())
    with torch.enable_grad():
        resumes = ends_alike(job, run)
    return Cell(
        family, method, losses[0], losses[-1], (adapter / "adapter_model.safetensors").stat().st_size,
        float((logits - theirs).abs().max()), merged, answers[0] == answers[1], resumes, time.perf_counter() - begin,
    )  # fmt: skip


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return made[0, ids.shape[1] :].tolist()


def ends_alike(job: Path, run: RunFolder) -> bool:
    """Takes the last checkpoint away, lets the run go on from the one before, and compares the weights."""
    before = open_run(str(run.path), job.parent)
    shutil.rmtree(run.checkpoints / f"step-{STEPS:08d}")
    train(job)
    after = open_run(str(run.path), job.parent)
    pairs = zip(before.model.named_parameters(), after.model.named_parameters(), strict=True)
    return after.step == before.step == STEPS and all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def column(arguments: tuple[str, str, tuple[str, ...]]) -> list[Cell]:
    """A family under all methods."""
    family, folder_name, methods = arguments
    torch.set_num_threads(1)
    quiet_libraries()
    folder = Path(folder_name) / family
    folder.mkdir()
    base = make_base(family, folder)
    cells = []
    for method in methods:
        try:
            cell = make_cell(family, method, base, folder)
        except Exception as error:  # some cannot be sent to another process
            raise RuntimeError(f"{family}, {method}: {type(error).__name__}: {error}") from None
        print(_line(cell), file=sys.stderr, flush=True)
        cells.append(cell)
    return cells


def _line(cell: Cell) -> str:
    merged = "-" if cell.merged is None else f"{cell.merged:.0e}"
    losses = f"{cell.before:.3f} | {cell.after:.3f}"
    return (
        f"| {cell.family} | {cell.method} | {losses} | {cell.bytes:,} | {cell.reload:.0e} | "
        f"{merged} | {'yes' if cell.answers else 'NO'} | {'yes' if cell.resumes else 'NO'} |"
    )


def page(cells: list[Cell], seconds: float) -> str:
    """The table as Markdown."""
    head = f"""# Every family, every way to tune

Tiny random models, first trained whole for {BASE_STEPS} steps, then tuned for {STEPS} to name a question's topic.
Written by `make tune-matrix` on {date.today()} in {seconds / 60:.1f} minutes, with torch {torch.__version__},
transformers {transformers.__version__} and peft {peft.__version__} on {platform.machine()}:
{sum(c.holds for c in cells)} of {len(cells)} cells hold. The differences are of logits: of plain transformers and peft
on the saved adapter, and of the merged model.

| family | method | loss before | after | adapter, bytes | reload | merged | answers alike | resumes |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
    return "\n".join([head, *map(_line, cells)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--to", default="docs/tune_matrix.md", help="the file; - prints the page")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with TemporaryDirectory() as name:
        block = SourceBlock(path="chatterbot-corpus")
        backend = learn_vocabulary([(open_source(block, Path(name)), block)], VOCABULARY)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>")
        tokenizer.save_pretrained(Path(name) / "tokenizer")
        work = [(family, name, tuple(arguments.methods)) for family in arguments.families]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            cells = [cell for cells in pool.imap(column, work) for cell in cells]
    text = page(cells, time.perf_counter() - begin)
    print(text) if arguments.to == "-" else Path(arguments.to).write_text(text, encoding="utf-8")
    return int(not all(cell.holds for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
