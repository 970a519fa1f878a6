"""``ranking``: models of clicks and ratings, a dense tower over embedding tables that grow with the ids."""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.data.ranking.ranking_block import EXAMPLES, REASONS, RankingBlock
from stoker.job.block import Block
from stoker.job.task_spec import BlockSpec, Decided, Named, RowSpec, TaskSpec, block_of_task
from stoker.train.own_model import OwnModel
from stoker.train.ranking.ranking_conflicts import RANKING_CHECKS

if TYPE_CHECKING:
    from stoker.hardware.process_device import Device
    from stoker.job.load_job import LoadedJob
    from stoker.job.resolved import ResolvedJob
    from stoker.job.schema import Job
    from stoker.parallel.mesh import Mesh
    from stoker.train.prepared import Prepared

BATCH = 256
HELD_OUT = 0.1


def _block(job: Job) -> RankingBlock:
    block: Block | None = getattr(job, "ranking", None)
    return block if isinstance(block, RankingBlock) else RankingBlock()


def _defaults(job: Job) -> dict[str, Decided]:
    found = {
        "train.lr": Decided(1e-3, "AdamW's usual rate for a network of one's own; the tables have their own"),
        "train.weight_decay": Decided(0.0, "none, as in most click models"),
        "evaluate.rows": Decided("all", "the held-out rows are used whole"),
    }
    if not job.evaluate.data:
        progressive = _block(job).progressive
        why = "every day is held out until it is trained on" if progressive else "the latest tenth of the rows"
        found["evaluate.fraction"] = Decided(0.0 if progressive else HELD_OUT, why)
    if _block(job).progressive and job.train.schedule == "constant":
        found["train.warmup"] = Decided(0, "none, as a fraction of the steps would change when the log grows")
    return found


def _prepare(loaded: LoadedJob, device: Device, mesh: Mesh | None, base: Path) -> Prepared:
    from stoker.train.ranking.prepare_ranking import prepare_ranking

    return prepare_ranking(loaded, device, mesh, base)


def _names(job: Job) -> tuple[Named, ...]:
    servers = _block(job).servers
    if servers is None:
        return ()
    addresses = (Named("ranking.servers.addresses", address, "address") for address in servers.addresses)
    return (Named("ranking.servers.secret", servers.secret, "secret"), *addresses)


def _toy(loaded: LoadedJob) -> tuple[dict[str, Any], int, tuple[str, ...]]:
    """Returns the model and the log themselves: towers are small, and rows are read from columns on disk."""
    from stoker.errors import UserError
    from stoker.job.paths import absolute, exists
    from stoker.node_cache.urls import is_url
    from stoker.train.ranking.job_log import open_log_of

    base, job = Path.cwd(), loaded.job
    if block_of_task(job, RankingBlock).engine != "stoker":
        message = "`stoker verify` compares in float64, and `engine: torchrec` has rows of float32"
        raise UserError(loaded.problem("ranking.engine", message, "write `engine: stoker`"))
    data = []
    for source in job.data:
        path = source.path
        if exists(place := absolute(path, base)):
            path = str(place)
        elif glob.has_magic(path) and not is_url(path):
            path = str(absolute(path, Path(glob.escape(str(base)))))
        data.append({"path": path, "format": source.format} | ({"split": source.split} if source.split else {}))
    block = block_of_task(job, RankingBlock).model_copy(update={"progressive": False, "servers": None})
    values = {key: value for key, value in block.model_dump(exclude_none=True).items() if value != []}
    facts = []
    if (dtype := values["table"].pop("dtype")) != "float32":
        facts.append(f"rows of tables in float64, as rows of {dtype} cannot be compared exactly")
    if block_of_task(job, RankingBlock).servers is not None:
        facts.append("without `ranking.servers`: the processes hold the rows, and no server is asked")
    if block_of_task(job, RankingBlock).progressive:
        facts.append(
            "without `ranking.progressive`: rows are shuffled, and no day is evaluated before it is trained on"
        )
    evaluate = job.evaluate.model_copy(update={"data": [], "fraction": HELD_OUT})  # what the copy has by default
    own_split = replace(loaded, job=job.model_copy(update={"evaluate": evaluate}))
    return {"ranking": values, "data": data}, len(open_log_of(own_split, base).training), tuple(facts)


def _next(job: ResolvedJob, run: str) -> tuple[str, ...]:
    found = (f"eval {run}", f"eval {run} YOUR.csv --json")
    own = block_of_task(job, RankingBlock).engine == "stoker"
    return (*found, f"export {run} --format ranking --to exported") if own else (*found, f"serve {run}")


TASK = TaskSpec(
    name="ranking",
    defaults=_defaults,
    batch=BATCH,
    block=BlockSpec(written=RankingBlock, reasons=REASONS, examples=EXAMPLES, checks=RANKING_CHECKS),
    names=_names,
    runs_code=lambda job: ":" in block_of_task(job, RankingBlock).model,
    rows=RowSpec(chat=False),
    own_model=OwnModel(prepare=_prepare, instead={"model": "name it in `ranking.model`"}, toy=_toy),
    ranks=True,
    grows=lambda job: block_of_task(job, RankingBlock).progressive,
    exports=("ranking",),
    next_commands=_next,
)
