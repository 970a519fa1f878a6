"""Serving with Stoker's own engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stoker.hardware.process.openmp import in_temporary_thread
from stoker.resilience.stop_signals import stop_is_success
from stoker.serve.app import app_of
from stoker.serve.endpoint_state import Service
from stoker.serve.engine_thread import EngineThread
from stoker.serve.metrics import Metrics
from stoker.serve.ranking_server import ranks, serve_ranking
from stoker.serve.served_models.open_served import open_served
from stoker.serve.served_models.served import Models
from stoker.serve.server import listening_socket, serve, tls_of
from stoker.serve.server_options import ServerOptions, options_of


def service_of(models: Models, options: ServerOptions) -> Service:
    """Returns the state of a server; its worker has yet to be started."""
    worker = EngineThread()
    worker.engines += [host.engine for host in models.hosts]
    return Service(models, worker, options, Metrics(models))


def serve_torch(arguments: argparse.Namespace, token: str | None, trusted: Sequence[str]) -> int:
    """Loads the models and serves them until SIGTERM."""
    if any(ranks(written, Path.cwd()) for written in arguments.runs):
        return serve_ranking(arguments, token, trusted)
    bound = listening_socket(arguments.host, arguments.port)  # checked before loading, which takes minutes
    here, at, rows = Path.cwd(), arguments.at, arguments.rows
    with stop_is_success(at_once=True):
        models = in_temporary_thread(
            lambda: open_served(arguments.runs, here, at=at, trusted=trusted, base=arguments.base, rows=rows)
        )
    service = service_of(models, options_of(arguments, token))
    service.worker.start()
    print(f"models: {', '.join(served.name for served in models)}", flush=True)
    serve(app_of(service), bound, tls=tls_of(arguments), seconds=arguments.timeout, drain=service.drain)
    service.worker.close()
    return 0
