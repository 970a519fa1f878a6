"""The blocks of ``target:``, which selects where `stoker submit` starts a job. One file a kind; `KINDS` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, create_model

from stoker.job.block import Block
from stoker.job.targets.kubernetes import KubernetesBlock
from stoker.job.targets.ray import RayBlock
from stoker.job.targets.slurm import SlurmBlock
from stoker.job.targets.ssh import SshBlock

LOCAL = "local"
KINDS: dict[str, type[Block]] = {
    "ssh": SshBlock,
    "slurm": SlurmBlock,
    "ray": RayBlock,
    "kubernetes": KubernetesBlock,
}


class TargetBlock(Block):
    """Where `stoker submit` starts the job: exactly one of its blocks."""


if not TYPE_CHECKING:
    TargetBlock = create_model(
        "TargetBlock",
        __base__=TargetBlock,
        __module__=__name__,
        __doc__=TargetBlock.__doc__,
        **{
            kind: (block | None, Field(default=None, description=(block.__doc__ or "").partition(".")[0].strip()))
            for kind, block in KINDS.items()
        },
    )


def chosen_block(target: TargetBlock) -> tuple[str, Block] | None:
    """Kind and block of a target; None unless exactly one is written."""
    written = [(kind, getattr(target, kind)) for kind in KINDS if getattr(target, kind) is not None]
    return written[0] if len(written) == 1 else None
