"""Write a run as an adapter (peft), merged weights (transformers) or GGUF (llama.cpp), and replay it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stoker.cli.checkpoint_option import add_at
from stoker.cli.trust_options import add_trust, trusted

FORMATS = ("adapter", "merged", "gguf")
QUANTISED = ("8bit", "4bit", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``stoker export``."""
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
    parser.add_argument("--format", choices=FORMATS, required=True, help="adapter, merged or gguf")
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--dtype", help="of the weights: fp32, bf16, fp16; gguf: fp32, fp16, q8_0")
    parser.add_argument("--quantise", choices=QUANTISED, help="hold merged weights in 8 or 4 bits, or as int8 or int4")
    add_at(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export, replay, and only then call it done."""
    from stoker.cli.report import quiet_libraries

    quiet_libraries()
    from stoker.checkpoint.export import Export, check_export
    from stoker.checkpoint.export_check import export_run
    from stoker.checkpoint.load_run import open_run

    base = Path.cwd()
    tuned = open_run(arguments.run, base, at=arguments.at, trusted=trusted(arguments))
    export = Export(arguments.format, base / arguments.to, arguments.dtype, arguments.quantise)
    check_export(tuned, export)
    done = export_run(tuned, export, base)
    line, written = done.verified.line, str(done.written)
    tuned.folder.event("exported", format=export.format, to=written, step=tuned.step, verified=line)
    if arguments.json:
        answer = {"written": written, "step": tuned.step, "verified": line, "loss": done.verified.as_json()}
        answer |= {"base": done.base, "warnings": [done.warning] if done.warning else []}
        print(json.dumps(answer | ({"quantised": done.drift} if done.drift else {})))
    else:
        print("\n".join(filter(None, (f"step {tuned.step} -> {written}", line, done.drift))))
    if done.warning:
        print(f"WARNING: {done.warning}", file=sys.stderr)
    return 0
