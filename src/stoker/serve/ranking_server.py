"""Serving of ranking models: runs, exported folders, and stores that change while they are served."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from stoker.data.ranking.ranking_block import RankingBlock
from stoker.data.ranking.recorded_features import FEATURES_FILE, features_of_run
from stoker.errors import Problem, UserError
from stoker.hardware.process.openmp import in_temporary_thread
from stoker.job.load_job import load_job
from stoker.job.paths import absolute
from stoker.job.task_spec import task_of
from stoker.models.tuning.quantise import device_for
from stoker.online_store.export_digests import check_files
from stoker.online_store.row_reader import RowReader
from stoker.online_store.store_writers import SCHEMES, store_errors
from stoker.resilience.stop_signals import stop_is_success
from stoker.serve.metrics import Metrics
from stoker.serve.ranking_app import RankingService, ranking_app
from stoker.serve.score_batcher import MOST_ROWS, RowScorer, ScoreBatcher
from stoker.serve.served_models.open_served import name_and_place
from stoker.serve.server import listening_socket, serve, tls_of
from stoker.serve.server_options import ServerOptions, options_of
from stoker.train.ranking.open_run import open_job, restored_model
from stoker.train.ranking.ranking_scorer import StoredScorer, module_scorer


def ranks(written: str, folder: Path) -> bool:
    """Returns whether a name is a ranking model: a store, an export, or a run of the task."""
    _, place = name_and_place(written, folder)
    if place.partition("://")[0] in SCHEMES:
        return True
    path = absolute(place, folder)
    if (path / "manifest.json").is_file() and (path / "tower.safetensors").is_file():
        return True
    for run in (path, folder / "runs" / place):
        if (run / "job.yaml").is_file() and (run / FEATURES_FILE).is_file():
            return task_of(load_job(run / "job.yaml").job).ranks
    return False


def open_scorers(
    written: Sequence[str], folder: Path, *, at: str, trusted: Sequence[str], cache_rows: int, cache_seconds: float
) -> dict[str, RowScorer]:
    """Opens the models of a command line, by name.

    Raises:
        UserError: one is not a ranking model, cannot be read, or two have the same name.
    """
    found: dict[str, RowScorer] = {}
    for one in written:
        if not ranks(one, folder):
            raise UserError(Problem(f"{one} is not a ranking model", "serve language models by a server of their own"))
        name, place = name_and_place(one, folder)
        if place.partition("://")[0] in SCHEMES:
            with store_errors(place, opening=True):
                reader = RowReader(place, cache_rows=cache_rows, cache_seconds=cache_seconds)
                scorer: RowScorer = StoredScorer(reader, trusted=bool(trusted))
            name = name or reader.manifest["run"]
        elif (absolute(place, folder) / "manifest.json").is_file():
            path = absolute(place, folder)
            with store_errors(place):
                reader = RowReader(str(path))
                check_files(path, reader.manifest)
                scorer = StoredScorer(reader, trusted=bool(trusted))
            name = name or path.name
        else:
            scorer, name = _scorer_of_run(place, folder, at, trusted), name or Path(place).name
        if name in found:
            raise UserError(Problem(f"two models have the name {name}", "write NAME=RUN"))
        found[name] = scorer
    return found


def _scorer_of_run(place: str, folder: Path, at: str, trusted: Sequence[str]) -> RowScorer:
    run, loaded = open_job(place, trusted, folder)
    features, device = features_of_run(run), device_for(loaded.job)
    precision = "fp64" if device.precision == "fp64" else "fp32"
    host = replace(device, type="cpu", index=None, precision=precision)  # tables are on the host, and towers are small
    tower, tables, shape, step = restored_model(run, loaded, features, host, at, folder)
    block = _block(loaded.job)
    return module_scorer(
        tower,
        tables,
        shape,
        features,
        step=step,
        probabilities=block.gives_probabilities,
        ignored=block.ignore,
    )


def _block(job: object) -> RankingBlock:
    block = getattr(job, "ranking", None)
    assert isinstance(block, RankingBlock)
    return block


def ranking_service(
    scorers: dict[str, RowScorer], options: ServerOptions, *, rows: int | None = None
) -> RankingService:
    """Returns the state of a server, with its threads started."""
    models = {name: ScoreBatcher(scorer, most=rows or MOST_ROWS) for name, scorer in scorers.items()}
    for batcher in models.values():
        batcher.start()
    return RankingService(models, options, Metrics())


def serve_ranking(arguments: argparse.Namespace, token: str | None, trusted: Sequence[str]) -> int:
    """Opens the models and serves them until SIGTERM."""
    bound = listening_socket(arguments.host, arguments.port)
    opened = partial(
        open_scorers,
        arguments.runs,
        Path.cwd(),
        at=arguments.at,
        trusted=trusted,
        cache_rows=arguments.cache_rows,
        cache_seconds=arguments.cache_seconds,
    )
    with stop_is_success(at_once=True):
        scorers = in_temporary_thread(opened)
    service = ranking_service(scorers, options_of(arguments, token), rows=arguments.rows)
    print(f"models: {', '.join(service.models)}", flush=True)
    serve(ranking_app(service), bound, tls=tls_of(arguments), seconds=arguments.timeout, drain=service.drain)
    for batcher in service.models.values():
        batcher.close()
    return 0
