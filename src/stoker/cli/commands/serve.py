"""Serve runs, exported folders, GGUF files and hub models over OpenAI's API, or ranking models; see docs/serving.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from stoker.cli.options.run_options import add_at, add_trust, trusted
from stoker.cli.options.server_address import add_tls, check_access, check_address
from stoker.cli.options.token_file import check_token, read_token
from stoker.cli.preflight_names import require_hub_model
from stoker.errors import Problem, UserError
from stoker.resilience.stop_signals import stop_is_success

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "httpx2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``stoker serve``."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="a run, exported folder, GGUF file, hub id or catalogue name; adapters share their base. Ranking models: "
        "a run, exported folder, lmdb://PATH or redis://HOST:PORT/DB",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 chooses a free one (default: 8000)")
    parser.add_argument("--token", help="API key of the clients; visible in the process list of the machine")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token")
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="file of named API keys, written by `stoker keys`",
    )
    add_tls(parser)
    add_at(parser)
    parser.add_argument(
        "--base", metavar="MODEL", help="base model of adapter folders, overriding the one that they name"
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "llama.cpp", "vllm"),
        default="torch",
        help="inference engine: torch (default) is Stoker's own; the others run behind this server",
    )
    parser.add_argument(
        "--print-command", action="store_true", help="print the command line of the llama.cpp or vLLM server, and exit"
    )
    parser.add_argument(
        "--max-body", type=float, default=8.0, metavar="MIB", help="maximum size of a request (default: 8)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="time limit of a request in seconds (default: 600)"
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=512,
        metavar="N",
        help="maximum number of waiting and running answers; beyond it, error 429 (default: 512)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="maximum batch size (default: 64; 256 on a GPU; 16 with llama.cpp; 4096 rows for ranking models)",
    )
    parser.add_argument(
        "--cache-rows",
        type=int,
        default=1_000_000,
        metavar="N",
        help="cached rows of each table of a store (default: 1000000)",
    )
    parser.add_argument(
        "--cache-seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="maximum age of cached rows in seconds (default: 1)",
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM."""
    with stop_is_success():
        return _serve(arguments)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    _check(arguments)
    token = _token(arguments)
    from stoker.cli.output.quiet_libraries import quiet_libraries

    try:
        if arguments.engine != "torch":
            from stoker.serve.external_engine import serve_external

            return serve_external(arguments, token, quiet_libraries)
        quiet_libraries()
        for written in arguments.runs:
            require_hub_model(written.rpartition("=")[2], Path.cwd())
        from stoker.serve.torch_server import serve_torch

        return serve_torch(arguments, token, trusted(arguments))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in PACKAGES:
            raise
        raise UserError(Problem(f"serving needs {error.name}", "pip install 'stoker[serve]'")) from error


def _check(arguments: argparse.Namespace) -> None:
    """Rejects contradictory options.

    Raises:
        UserError: options contradict each other.
    """
    check_address(arguments)
    if not 0 < arguments.max_body <= 4096 or not 0 < arguments.timeout <= 86_400:
        raise UserError("--max-body is above 0 and at most 4096 MiB, --timeout above 0 and at most a day")
    if arguments.queue < 1 or (arguments.rows is not None and arguments.rows < 1):
        raise UserError("--queue and --rows are at least 1")
    if arguments.cache_rows < 0 or not 0 <= arguments.cache_seconds <= 86_400:
        raise UserError("--cache-rows is at least 0, --cache-seconds at least 0 and at most a day")
    if arguments.print_command and arguments.engine == "torch":
        raise UserError(
            Problem("--print-command shows the server of another program", "add --engine llama.cpp or --engine vllm")
        )
    if arguments.keys is not None:
        from stoker.serve.named_keys import SERVER_ROLES, read_keys

        if arguments.print_command:
            raise UserError(Problem("other programs do not support named keys", "leave out --keys"))
        read_keys(arguments.keys, SERVER_ROLES, option="--keys")
    has_token = any(given is not None for given in (arguments.token, arguments.token_file, arguments.keys))
    hint = "add --token-file FILE or --keys FILE"
    check_access(arguments, has_token=has_token, hint=hint, warn=not arguments.print_command)


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token is not None and arguments.token_file is not None:
        raise UserError("give --token or --token-file, not both")
    token: str | None = arguments.token
    if arguments.token_file is not None:
        return read_token(arguments.token_file, "--token-file")
    if token is not None:
        check_token(token, "python -c 'import secrets; print(secrets.token_urlsafe())'")
    return token
