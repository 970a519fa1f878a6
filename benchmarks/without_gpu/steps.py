"""A step of training as torch for CUDA runs it, on a machine without a GPU: launches, waits, products and peak memory.

    PYTHONPATH=src PYTHON benchmarks/without_gpu/steps.py [--shape pretrain-1b] [--layers 2] [KEY=VALUE ...]

PYTHON has torch 2.11 or later for CUDA 13 (its wheel brings Triton with ptxas, and the headers of CUDA); g++ is needed
too. A library in place of CUDA's runtime, driver and cuBLAS states an H200 and gives the host's memory as the device's.
Real are: every call, its order, sizes and dtypes; the code that Triton compiles for sm_90a; torch's allocator and its
peaks. Not real are values and times: kernels are recorded and do nothing, and what is read back is zero.
Further arguments are settings of the job, such as train.compile=true. Not covered: cuDNN, NCCL, several GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
MEANINGS = {"K": "of libraries", "T": "of Triton", "P": "products", "Z": "memsets", "G": "graphs"}
STEPS = 3  # the first compiles, the second has optimizer states from its beginning; the last is reported


def build(folder: Path) -> Path:
    """Compiles the library, under the name of the driver's."""
    site = Path(sysconfig.get_path("purelib"))
    library = folder / "libcuda.so.1"
    headers = [f"-I{site / 'nvidia/cu13/include'}", f"-I{site / 'triton/backends/nvidia/include'}"]
    options = [
        "-O1",
        "-w",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(library),
        "-ldl",
    ]
    subprocess.run(["g++", *headers, *map(str, sorted(HERE.glob("*.cpp"))), *options], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return library


def records(library: ctypes.CDLL) -> Counter[tuple[str, str, int]]:
    """How often each (kind, name, bytes) was recorded since the last call."""
    library.record_kind.restype = ctypes.c_char
    library.record_name.restype = ctypes.c_char_p
    library.record_count.restype = library.record_bytes.restype = ctypes.c_size_t
    indices = map(ctypes.c_size_t, range(library.record_count()))
    found = Counter(
        (library.record_kind(i).decode(), library.record_name(i).decode(), library.record_bytes(i)) for i in indices
    )
    library.clear_records()
    return found


def report(found: Counter[tuple[str, str, int]]) -> None:
    """Prints what a step has launched, copied and waited for."""
    by_kind: Counter[str] = Counter()
    products: Counter[str] = Counter()
    for (kind, name, _), times in found.items():
        by_kind[kind] += times
        if kind == "P":
            products[name.split("k", 1)[-1].split(" ", 1)[-1]] += times
    print("launches:", ", ".join(f"{by_kind[kind]} {what}" for kind, what in MEANINGS.items()))
    for dtypes, times in products.most_common():
        print(f"  {times} products {dtypes}")
    for (kind, name, size), times in sorted(found.items()):
        if kind == "S" or (kind == "C" and "D2D" not in name):
            print(f"{'waits:' if kind == 'S' else 'copies:'} {times} x {name}, {size:,} bytes")


def train(arguments: argparse.Namespace, folder: Path, library: ctypes.CDLL) -> None:
    """Trains some steps of a shape of `gpu_shapes`, and reports the last one."""
    sys.path.insert(0, str(HERE.parent))
    import torch
    from gpu_shapes import SHAPES, make_inputs

    from stoker.hardware.process_device import open_device
    from stoker.job import load_job
    from stoker.runs.run_folder import RunFolder
    from stoker.train.hooks import Hook, StepMetrics
    from stoker.train.prepare import prepare
    from stoker.train.run import train_run

    torch.backends.cuda.enable_cudnn_sdp(False)
    shape = replace(SHAPES[arguments.shape], layers=arguments.layers)
    if arguments.vocabulary:
        shape = replace(shape, vocabulary=arguments.vocabulary)
    make_inputs(folder, shape, shape.batch * (STEPS + 1), torch.device("cuda"))
    open_device(torch.device("cuda", 0))
    torch.cuda.reset_peak_memory_stats()
    job = {
        "task": "pretrain",
        "model": str(folder / "model"),
        "data": str(folder / "rows.jsonl"),
        "steps": STEPS,
        "tune": {"method": shape.tune, "rank": 16, "alpha": 32} if shape.lora else "full",
        "train": {"lr": 1e-4, "batch": shape.batch, "micro_batch": shape.micro_batch, "seq_len": shape.length + 1}
        | {"pack": shape.documents > 1},
        "parallel": {"recompute": shape.recompute},
        "evaluate": {"fraction": 0.0},
        "checkpoint": {"every": 100_000, "best": False},
        "output": str(folder / "run"),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    prepared = prepare(load_job(path, arguments.settings), folder)
    run = RunFolder(folder / "run")

    def after_step(metrics: StepMetrics) -> None:
        found = records(library)
        if metrics.step == STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        if metrics.step == STEPS:
            report(found)
            measured = torch.cuda.max_memory_allocated() / 2**30
            predicted = json.loads(run.plan.read_text())["predicted"]["peak"] / 2**30
            print(f"peak memory: {measured:.3f} GiB, predicted {predicted:.3f} ({predicted / measured - 1:+.1%})")

    with run.take():
        train_run(prepared, run, folder, quiet=True, hooks=[Hook(after_step=after_step)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="pretrain-1b", help="of benchmarks/gpu_shapes.py")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, help="instead of the shape's")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    if preloaded := os.environ.get("LD_PRELOAD"):
        with tempfile.TemporaryDirectory() as folder:
            train(arguments, Path(folder), ctypes.CDLL(preloaded))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        environment = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
        again = subprocess.run([sys.executable, *sys.argv], env=os.environ | environment, check=False)
    raise SystemExit(again.returncode)


if __name__ == "__main__":
    main()
