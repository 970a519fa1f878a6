"""Servers of other programs behind this one: their start, and their abilities."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stoker.errors import Problem, RunFailed, UserError
from stoker.files import has_input
from stoker.hardware.process.parent_process import die_with_parent
from stoker.models.offline_models import BASE_FILE
from stoker.serve.served_models.adapter_config import CONFIG, check_start, is_adapter_folder, read_object

ROWS = 16  # concurrent answers of llama.cpp
START_SECONDS = 900.0
POLL = 0.2  # seconds between polls of a starting server
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # without an owner for the hub's oldest models


@dataclass(frozen=True)
class ExternalServer:
    """A server of another program.

    Attributes:
        command: its command line, listening on a free loopback port.
        names: names of the models that it serves.
        environment: additions to this process' environment; it holds the key, which a command line would reveal.
        settings: of llama.cpp as a Python package, which reads them from standard input; empty for a program.
    """

    program: str
    command: tuple[str, ...]
    names: tuple[str, ...]
    key: str
    environment: dict[str, str]
    port: int = 0
    settings: str = ""


def public_command(arguments: argparse.Namespace) -> str:
    """Returns the shell command that serves the same models without Stoker."""
    is_llamacpp = arguments.engine == "llama.cpp"
    words = _llamacpp_words(arguments) if is_llamacpp else _vllm_words(arguments)
    words += ["--host", arguments.host, "--port", str(arguments.port)]
    if arguments.tls_key is not None:
        key, certificate = ("--ssl-key-file", "--ssl-cert-file") if is_llamacpp else ("--ssl-keyfile", "--ssl-certfile")
        words += [key, str(arguments.tls_key), certificate, str(arguments.tls_certificate)]
    line = shlex.join(words)
    if arguments.token_file is not None:
        file = shlex.quote(str(arguments.token_file))
        return f"{line} --api-key-file {file}" if is_llamacpp else f'VLLM_API_KEY="$(cat {file})" {line}'
    if arguments.token is not None:
        return f"{'LLAMA' if is_llamacpp else 'VLLM'}_API_KEY={shlex.quote(arguments.token)} {line}"
    return line


def _named(written: str) -> tuple[str, str]:
    """Splits ``NAME=RUN`` into (name or empty, place)."""
    name, equals, place = written.partition("=")
    return (name, place) if equals and not Path(written).exists() else ("", written)


def _gguf(arguments: argparse.Namespace) -> tuple[str, str]:
    """Returns (name, file) of the one model for llama.cpp."""
    from stoker.models.model_source import find_model

    if len(arguments.runs) != 1:
        raise UserError("llama.cpp serves one GGUF file")
    name, place = _named(arguments.runs[0])
    source = find_model(place, Path.cwd())
    if source is None or source.kind != "gguf":
        what = f"{place} is not a GGUF file, which llama.cpp needs"
        raise UserError(Problem(what, f"stoker export {place} --format gguf --to FOLDER"))
    return name or Path(place).name.removesuffix(".gguf"), source.where


def _llamacpp_words(arguments: argparse.Namespace) -> list[str]:
    name, file = _gguf(arguments)
    named = ["--model", file, "--alias", name, "--parallel", str(arguments.rows or ROWS)]
    return ["llama-server", *named, "--kv-unified", "--jinja", "--no-webui"]


def _vllm_words(arguments: argparse.Namespace) -> list[str]:
    """Returns the command line for one model and adapters over it."""
    (name, place), adapters = _vllm_models(arguments)
    words = ["vllm", "serve", place, "--served-model-name", name]
    if arguments.rows is not None:
        words += ["--max-num-seqs", str(arguments.rows)]
    if arguments.trust_remote_code:
        words += ["--trust-remote-code"]
    if adapters:
        rank = 8
        for _, path in adapters:
            config = read_object(path / CONFIG)
            check_start(path, config)
            if isinstance(config.get("r"), int):
                rank = max(rank, config["r"])
        words += ["--enable-lora", "--max-lora-rank", str(1 << (rank - 1).bit_length()), "--lora-modules"]
        words += [f"{adapter}={path}" for adapter, path in adapters]
    return words


def _vllm_models(arguments: argparse.Namespace) -> tuple[tuple[str, str], list[tuple[str, Path]]]:
    """Returns name and place of the one model, and of each adapter."""
    bases, adapters = [], []
    for written in arguments.runs:
        name, place = _named(written)
        path = Path(place)
        if is_adapter_folder(path):
            adapters.append((name or path.name, path.resolve()))
        else:
            _check_no_run(place)
            bases.append((name or path.name, str(path.resolve()) if path.is_dir() else place))
    if not bases and adapters:
        base = arguments.base or _base_of(adapters[0][1])
        bases = [(Path(base).name, base)]
    if len(bases) != 1:
        raise UserError("vLLM serves one model, and adapters over it")
    for name, _ in (*bases, *adapters):
        if name.startswith("-"):
            hint = "rename the folder, or write NAME=FOLDER"
            raise UserError(Problem(f"vLLM would read the name {name} as an option", hint))
    return bases[0], adapters


def _check_no_run(place: str) -> None:
    """Rejects the name of a run, and what is probably a mistyped one."""
    from stoker.models.model_source import HUB_ID, find_model
    from stoker.runs.find_run import find_run

    if Path(place, "job.yaml").is_file() or Path("runs", place, "job.yaml").is_file():
        what = f"vLLM serves exported folders and hub ids, and {place} is a run"
        raise UserError(Problem(what, f"stoker export {place} --format merged --to FOLDER"))
    if HUB_ID.fullmatch(place) and not Path(place).exists() and find_model(place, Path.cwd(), or_run=True) is None:
        find_run(place, Path.cwd())  # raises the error that names the nearest run


def _base_of(adapter: Path) -> str:
    """Returns the folder or hub id of an adapter's model. vLLM would read other texts as options or addresses."""
    if (adapter / BASE_FILE).is_file():
        own = read_object(adapter / BASE_FILE).get("base")
        what = f"{adapter} was trained over {own} of Stoker's catalogue, whose weights vLLM does not load"
        raise UserError(Problem(what, "serve an export with --format merged"))
    named = read_object(adapter / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        what = f"{adapter}: its adapter_config.json has no base_model_name_or_path"
    elif os.path.isdir(named):  # noqa: PTH112  # Path.is_dir() raises for names too long and folders of other users
        return str(Path(named).resolve())
    elif _HUB_NAME.fullmatch(named):
        return named
    else:
        what = f"{adapter}: the model that its adapter_config.json names is neither a folder nor an id of the hub"
    raise UserError(Problem(what, "name it with --base MODEL"))


def server_to_start(arguments: argparse.Namespace) -> ExternalServer:
    """Returns the server to start.

    Raises:
        UserError: the program is not installed, or cannot serve what was requested.
    """
    key = secrets.token_urlsafe(24)
    if arguments.engine == "vllm":
        words = _vllm_words(arguments)
        if shutil.which("vllm") is None:
            raise UserError(Problem("vLLM is not installed: there is no program vllm", "pip install vllm"))
        port = _free_port()
        lora = words[words.index("--lora-modules") + 1 :] if "--lora-modules" in words else []
        names = (words[words.index("--served-model-name") + 1], *(word.partition("=")[0] for word in lora))
        words += ["--host", "127.0.0.1", "--port", str(port)]
        return ExternalServer("vLLM", tuple(words), names, key, {"VLLM_API_KEY": key}, port)
    name, file = _gguf(arguments)
    rows = arguments.rows or ROWS
    if find_spec("xllamacpp") is not None:
        from stoker.hardware.processor import available_cores

        settings = {"model": file, "name": name, "rows": rows, "key": key, "threads": available_cores()}
        command = (sys.executable, "-P", "-m", "stoker.serve.llamacpp_process")
        return ExternalServer("llama.cpp", command, (name,), key, {}, settings=json.dumps(settings))
    if shutil.which("llama-server") is None:
        what = "llama.cpp is not installed: neither the package xllamacpp nor the program llama-server"
        raise UserError(Problem(what, "pip install 'stoker[llamacpp]'"))
    port = _free_port()
    words = [*_llamacpp_words(arguments), "--host", "127.0.0.1", "--port", str(port)]
    return ExternalServer("llama.cpp", tuple(words), (name,), key, {"LLAMA_API_KEY": key}, port)


def _free_port() -> int:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class RunningServer:
    """A started server of another program; it ends with this process.

    Attributes:
        address: its URL.
    """

    def __init__(self, server: ExternalServer) -> None:
        self.server = server
        environment = {**os.environ, **server.environment}
        self._process = subprocess.Popen(
            server.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if server.settings else sys.stderr,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C at the terminal must drain this server before the other one ends
            preexec_fn=die_with_parent,  # noqa: PLW1509 -- a system call that takes no lock
        )
        try:
            self.address = self._address()
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Ends the server."""
        with suppress(BrokenPipeError):  # settings that a server which has died did not read
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _address(self) -> str:
        """Waits until the server listens, and returns its address.

        Raises:
            RunFailed: it exits instead, or the timeout passes.
        """
        if self.server.settings:
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(self.server.settings + "\n")
                self._process.stdin.flush()
            if not has_input(self._process.stdout.fileno(), START_SECONDS):
                raise RunFailed(f"{self.server.program} does not answer after {START_SECONDS:g} s")
            address = self._process.stdout.readline().strip()
            if not address:
                raise RunFailed(f"{self.server.program} exited during its start; its output is above")
            return address
        import httpx2

        address, deadline = f"http://127.0.0.1:{self.server.port}", time.monotonic() + START_SECONDS
        with httpx2.Client(trust_env=False) as client:
            while time.monotonic() < deadline:
                if not self.alive:
                    raise RunFailed(f"{self.server.program} exited during its start; its output is above")
                try:
                    if client.get(f"{address}/health").status_code == 200:
                        return address
                except httpx2.TransportError:
                    pass
                time.sleep(POLL)
        raise RunFailed(f"{self.server.program} did not listen within {START_SECONDS:g} s")


def serve_external(arguments: argparse.Namespace, token: str | None, prepare: Callable[[], None]) -> int:
    """Starts the other program's server and serves it until SIGTERM, or prints its command line.

    Args:
        prepare: called before libraries are loaded.
    """
    if arguments.print_command:
        print(public_command(arguments))
        return 0
    server = server_to_start(arguments)
    prepare()
    from stoker.serve.proxy import serve_behind
    from stoker.serve.server import listening_socket

    bound = listening_socket(arguments.host, arguments.port)  # checked before loading, which takes minutes
    running = RunningServer(server)
    try:
        return serve_behind(running, bound, arguments, token)
    finally:
        running.end()
