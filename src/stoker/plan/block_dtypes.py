"""The dtypes in which a block computes under Stoker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Held = Literal["fp32", "16-bit"]
FLOAT, HALF = 4, 2  # bytes


@dataclass(frozen=True)
class BlockDtypes:
    """The dtypes in which a block computes; sizes are bytes of a number.

    Attributes:
        stream: of the hidden states that blocks add to.
        product: of the inputs and outputs of products.
        casts: whether each product saves a cast copy of its input.
        norms_trained: whether norms save the normalised values, which only their weights' gradients need.
        rank: of the adapters on the products; 0 if there are none.
        reads: whether products save their inputs, which only the gradients of their weights or adapters need.
    """

    stream: int
    product: int
    casts: bool
    norms_trained: bool = True
    rank: int = 0
    reads: bool = True

    @property
    def promoted(self) -> int:
        """Bytes of results of float32 weights and tables with hidden states: norms', rotated queries and keys."""
        return FLOAT if self.casts else self.stream


@lru_cache(maxsize=256)
def block_dtypes(precision: str, *, held: Held = "fp32", rank: int = 0, frozen: bool | None = None) -> BlockDtypes:
    """Returns the dtypes under Stoker.

    Args:
        precision: of products.
        held: the weights that a block computes with: float32 under autocast (one process, DDP), or 16-bit copies
            (FSDP2's mixed precision, and a frozen base). Hidden states are bfloat16 in both cases, and float16 in
            the second.
        rank: of adapters on a frozen base; 0 if there are none.
        frozen: whether the base is frozen; by default if there are adapters.
    """
    frozen = rank > 0 if frozen is None else frozen
    if precision in ("fp32", "tf32"):
        found = BlockDtypes(FLOAT, FLOAT, casts=False)
    elif frozen or held == "16-bit":
        found = BlockDtypes(HALF, HALF, casts=False)
    else:
        found = BlockDtypes(FLOAT if precision == "fp16" else HALF, HALF, casts=True)
    return replace(found, norms_trained=not frozen, rank=rank, reads=rank > 0 or not frozen)
