"""One GPU: a Llama of one billion parameters from random weights, LoRA and QLoRA on an 8B shape; Stoker beside a plain
loop.

    python benchmarks/gpu.py [--tasks pretrain-1b short-1b lora-8b qlora-8b] [--steps 20] [--json FILE]
                             [--sides compiled plain stoker float8 8bit liger liger-compiled deterministic
                              deterministic-eager]
                             [--recompute none|full] [--set parallel.offload=optimizer] [--profile FOLDER]
    python benchmarks/gpu.py --tiny --cpu        # the same code on small shapes, to see that it runs

All sides of a task train the same weights on the same rows: ``short-1b`` on rows of about 32 documents of 128 to 384
tokens, without the plain side, and the others on rows of one length. All have bfloat16 products over float32 trained
weights, AdamW and clipping at 1.0, each in a fresh process, which on a GPU ends after three minutes at the latest;
``compiled``, ``float8``, ``8bit`` (moments), ``deterministic`` (compiled and not) are Stoker with these keys. ``liger``
and ``liger-compiled`` are ``stoker`` and ``compiled`` with Liger's kernels of norms, rotary embedding and SwiGLU. The
plain side is what one writes by hand: transformers' model, the cross entropy of its logits, peft, torch's fused AdamW,
scaled-dot-product attention. QLoRA's base is nf4 of bitsandbytes on all sides, and its blocks are recomputed.

Measured: tokens per second by the clock over all steps but the first ones, model FLOP/s (the arithmetic that the
training needs, recomputation not counted), its share of the device's measured matrix ceiling, peak memory, seconds from
the job's file to the end of the first step, and, for Stoker, what the planner had predicted of memory and of a step. A
side is printed when it is done; one that fails does not end the others. ``--profile`` writes the kernels of one more
step of Stoker's sides into the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_shapes import RANK, SHAPES, TINY, WORDS, Shape, make_inputs
from own_process import in_own_process
from torch import nn
from torch.profiler import ProfilerActivity, profile

LR, WARM = 1e-4, 5
HEADING = (
    f"{'task':<12} {'side':<19} {'tokens/s':>9} {'TFLOP/s':>8} {'of ceiling':>14} {'peak GiB':>9} {'planned':>8} "
    f"{'step s':>8} {'planned':>8} {'first s':>8}   losses, device"
)


SIDES: dict[str, list[str]] = {  # keys of Stoker's job; those that a short time must suffice for come first
    "compiled": ["train.compile=true"],
    "plain": [],
    "stoker": [],
    "float8": ["train.compile=true", "train.float8=rowwise"],
    "8bit": ["train.optimizer_states=8bit"],
    "liger": [],
    "liger-compiled": ["train.compile=true"],
    "deterministic": ["train.compile=true", "train.deterministic=true"],
    "deterministic-eager": ["train.deterministic=true"],
}
LIGER = ("liger", "liger-compiled")
DETERMINISTIC = ("deterministic", "deterministic-eager")
NAMED = (*LIGER, *DETERMINISTIC)  # measured only if named
FULL = ("float8", "8bit", *DETERMINISTIC)  # not for LoRA


@dataclass
class Result:
    """What one side of a task measured."""

    task: str
    side: str
    device: str
    tokens_per_s: float
    tflops: float
    ceiling_tflops: float
    peak_gib: float
    losses: list[float]
    step_s: float
    first_step_s: float
    planned_gib: float | None = None
    planned_s: float | None = None
    attention: str = ""

    @property
    def share(self) -> float:
        """The share of the ceiling."""
        return self.tflops / self.ceiling_tflops


@dataclass
class Measured:
    """The steps of one side: seconds and tokens of those measured, all losses, seconds until the first step's end, what
    the planner predicted, and the kernels of attention."""

    seconds: float
    tokens: int
    losses: list[float]
    first: float
    planned: tuple[float, float] | None = None
    attention: str = ""


def ceiling(device: torch.device) -> float:
    """TFLOP/s of square matrix products, bfloat16 on a GPU and float32 on a CPU: the best of five rounds."""
    gpu = device.type == "cuda"
    size, dtype, times = (8192, torch.bfloat16, 20) if gpu else (1024, torch.float32, 4)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        wait(device)
        begin = time.perf_counter()
        for _ in range(times):
            a @ b
        wait(device)
        best = max(best, times * 2 * size**3 / (time.perf_counter() - begin) / 1e12)
    return best


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def use_liger() -> None:
    """Gives the Llamas that are built from now on Liger's norms, rotary embedding and SwiGLU, but not its loss."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError as error:
        sys.exit(f"liger-kernel cannot be imported ({error}): `make gpu-packages gpu-site` installs it")
    apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)


def stoker(folder: Path, shape: Shape, side: str, arguments: argparse.Namespace, device: torch.device) -> Measured:
    """Stoker's own loop, as ``stoker train`` runs it."""
    begin = time.perf_counter()
    from stoker.cli.output.quiet_libraries import quiet_libraries

    quiet_libraries()
    if side in LIGER:
        use_liger()
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.hooks import Hook
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    job = folder / "job.yaml"
    pack = "true" if shape.documents > 1 else "false"
    tune = f"{{method: {shape.tune}, rank: {RANK}, alpha: {2 * RANK}}}" if shape.lora else "full"
    profiled = 1 if arguments.profile else 0
    job.write_text(
        f"task: pretrain\nmodel: {folder}/model\ndata: {folder}/rows.jsonl\nsteps: {arguments.steps + profiled}\n"
        f"tune: {tune}\noutput: {folder}/{side}\nevaluate: {{fraction: 0.0}}\n"
        "checkpoint: {every: 100000, best: false}\n"
        f"train: {{lr: {LR}, schedule: constant, warmup: 0, weight_decay: 0.0, batch: {shape.batch}, "
        f"micro_batch: {shape.micro_batch}, seq_len: {shape.length + 1}, pack: {pack}, clip: 1.0}}\n"
        f"parallel: {{recompute: {arguments.recompute or shape.recompute}}}\n"
    )
    precision = ["train.precision=fp32"] if arguments.cpu else []
    loaded = load_job(job, [*precision, *SIDES[side], *arguments.set])
    prepared = prepare(loaded, folder)
    run = RunFolder(folder / side)
    ends: dict[int, float] = {}
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def after_step(metrics: Any) -> None:
        if metrics.step in (1, WARM, arguments.steps):
            wait(device)
            ends[metrics.step] = time.perf_counter()
        if profiled and metrics.step == arguments.steps:
            profiler.start()

    with run.take():
        train_run(prepared, run, folder, quiet=True, hooks=[Hook(after_step=after_step)])
    if profiled:
        wait(device)
        profiler.stop()
        table = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=90)
        (arguments.profile / f"{folder.name}-{side}.txt").write_text(table)
    metrics = run.read_metrics()
    measured = metrics[WARM : arguments.steps]
    predicted = json.loads(run.plan.read_text())["predicted"]
    return Measured(
        ends[arguments.steps] - ends[WARM],
        sum(m["trained_tokens"] for m in measured),
        [m["loss"] for m in metrics],
        ends[1] - begin,
        (predicted["peak"] / 2**30, predicted["seconds"]) if predicted else None,
        prepared.facts.get("attention", ""),
    )


def plain(folder: Path, shape: Shape, arguments: argparse.Namespace, device: torch.device) -> Measured:
    """A loop of transformers, peft and torch as one writes it by hand."""
    started = time.perf_counter()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    nf4 = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": low,
    }
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=low if shape.lora else torch.float32,
        attn_implementation="sdpa",
        device_map={"": device},
        quantization_config=BitsAndBytesConfig(**nf4) if shape.tune == "qlora" else None,
    )
    if (arguments.recompute or shape.recompute) == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if shape.lora:
        torch.manual_seed(0)
        settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    steps = arguments.steps
    texts = [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], WORDS] for text in texts[: steps * shape.batch]])
    losses, begin, first = [], 0.0, 0.0
    for step in range(steps):
        if step == WARM:
            wait(device)
            begin = time.perf_counter()
        total = torch.zeros((), device=device)
        for rows in ids[step * shape.batch : (step + 1) * shape.batch].split(shape.micro_batch):
            rows = rows.to(device)  # noqa: PLW2901
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=rows[:, :-1]).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")
                loss = loss / (shape.batch * shape.length)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if not step:
            wait(device)
            first = time.perf_counter() - started
    wait(device)
    seconds = time.perf_counter() - begin
    return Measured(seconds, (steps - WARM) * shape.batch * shape.length, [float(loss) for loss in losses], first)


def trains(side: str, shape: Shape) -> bool:
    """Returns whether a side trains a shape."""
    return not (shape.lora and side in FULL) and not (shape.documents > 1 and side == "plain")


def run_side(task: str, side: str, shape: Shape, arguments: argparse.Namespace) -> Result:
    """One side of a task, in this process."""
    device = torch.device("cpu" if arguments.cpu else "cuda")
    from stoker.hardware.process_device import choose_device, open_device

    open_device(device if arguments.cpu else torch.device("cuda", 0))
    measured = choose_device()
    best = ceiling(device)
    if not arguments.cpu:
        torch.cuda.reset_peak_memory_stats()
    if side == "plain":
        done = plain(arguments.folder, shape, arguments, device)
    else:
        done = stoker(arguments.folder, shape, side, arguments, device)
    peak = measured.peak_memory()
    rate = done.tokens / done.seconds
    best = max(best, ceiling(device))
    return Result(
        task,
        side,
        measured.name,
        rate,
        rate * shape.flop_per_token() / 1e12,
        best,
        peak,
        done.losses,
        done.seconds / (arguments.steps - WARM),
        done.first,
        *(done.planned or (None, None)),
        done.attention,
    )


def run_task(task: str, shape: Shape, arguments: argparse.Namespace) -> Iterator[tuple[str, Result | str]]:
    """Yields what each side of a task has measured in its own process, or why it failed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / task
        folder.mkdir()
        failure = in_own_process(__file__, "--make", task, "--folder", str(folder), cpu=arguments.cpu)
        if failure is not None:
            yield "inputs", str(failure)
            return
        for side in arguments.sides:
            if trains(side, shape):
                found = in_own_process(__file__, "--side", task, side, "--folder", str(folder), cpu=arguments.cpu)
                yield side, Result(**found) if isinstance(found, dict) else str(found)


def main() -> None:
    """Runs every side of every task in its own process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument(
        "--sides",
        nargs="+",
        default=[side for side in SIDES if side not in NAMED],
        choices=SIDES,
        help=f"by default all but {' and '.join(NAMED)}; {', '.join(FULL)} are not for LoRA",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recompute", choices=["none", "full"], help="by default full for QLoRA only")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in float32")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more keys of Stoker's job")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write the kernels of a step of Stoker there")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = dict(SHAPES)
    if arguments.tiny:
        shapes = {name: replace(s, **TINY, documents=min(s.documents, 4)) for name, s in SHAPES.items()}
    if arguments.side:
        task, side = arguments.side
        print("RESULT " + json.dumps(asdict(run_side(task, side, shapes[task], arguments))))
        return
    if arguments.make:
        rows = shapes[arguments.make].batch * (arguments.steps + 1)
        make_inputs(arguments.folder, shapes[arguments.make], rows, torch.device("cpu" if arguments.cpu else "cuda"))
        return
    if arguments.profile:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    if arguments.steps <= WARM:
        parser.error(f"--steps {arguments.steps}: the first {WARM} are not measured")
    results: list[Result] = []
    failed = False
    print(HEADING)
    for task in arguments.tasks:
        for side, found in run_task(task, shapes[task], arguments):
            if isinstance(found, str):
                print(f"{task:<12} {side:<19} failed: {found}", flush=True)
                failed = True
                continue
            results.append(found)
            print(line_of(found), flush=True)
            if arguments.json:
                arguments.json.write_text(
                    json.dumps([{**asdict(r), "share": r.share} for r in results], indent=1) + "\n"
                )
    if failed:
        sys.exit(1)


def line_of(r: Result) -> str:
    """What a side measured, below `HEADING`."""
    gib, seconds = (f"{x:8.3f}" if x is not None else f"{'':8}" for x in (r.planned_gib, r.planned_s))
    return (
        f"{r.task:<12} {r.side:<19} {r.tokens_per_s:>9,.0f} {r.tflops:>8.2f} "
        f"{r.share:>6.1%} of {r.ceiling_tflops:<5.1f} {r.peak_gib:>8.2f} {gib} {r.step_s:8.3f} {seconds} "
        f"{r.first_step_s:8.1f}   {r.losses[0]:.4f} to {r.losses[-1]:.4f}, {r.device}"
        f"{f'; attention: {r.attention}' if r.attention else ''}"
    )


if __name__ == "__main__":
    main()
