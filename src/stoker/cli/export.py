"""Write a run as an adapter (peft), merged weights (transformers) or GGUF (llama.cpp), and replay it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stoker.cli.trust import add_trust, trusted

FORMATS = ("adapter", "merged", "gguf")
QUANTISED = ("8bit", "4bit", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker export``."""
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
    parser.add_argument("--format", choices=FORMATS, required=True, help="adapter, merged or gguf")
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--dtype", help="of the weights: fp32, bf16, fp16; gguf: fp32, fp16, q8_0")
    parser.add_argument("--quantise", choices=QUANTISED, help="hold merged weights in 8 or 4 bits, or as int8 or int4")
    parser.add_argument("--at", default="last", metavar="CHECKPOINT", help="last, best, or a step (default: last)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, replay, and only then call it done."""
    from stoker.cli.report import quiet_libraries

    quiet_libraries()
    from stoker.checkpoint.export import DTYPES, Export, check_export, quantised_run, write_export
    from stoker.checkpoint.tuned import open_run
    from stoker.checkpoint.verify import drift, take_reference, verify

    base = Path.cwd()
    tuned = open_run(arguments.run, base, at=arguments.at, trusted=trusted(arguments))
    export = Export(arguments.format, base / arguments.to, arguments.dtype, arguments.quantise)
    check_export(tuned, export)
    reference = take_reference(tuned, base)
    said: list[str] = []
    lost = ""
    if arguments.quantise:
        tuned = quantised_run(tuned, arguments.quantise, DTYPES[export.weights])
        trained, reference = reference, take_reference(tuned, base)
        lost = drift(trained, reference)
    written = write_export(tuned, export, base, lambda path: said.append(verify(reference, export, path)))
    tuned.folder.event("exported", format=export.format, to=str(written), step=tuned.step, verified=said[0])
    if arguments.json:
        answer = {"written": str(written), "step": tuned.step, "verified": said[0]}
        print(json.dumps(answer | ({"quantised": lost} if lost else {})))
    else:
        print(f"step {tuned.step} -> {written}\n{said[0]}" + (f"\n{lost}" if lost else ""))
    return 0
