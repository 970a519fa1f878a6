"""Base of the job file's blocks: strict pydantic models and bounded numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
LARGEST = 2**31 - 1  # upper limit of counts: more than any run needs, and within the integers of the libraries below
LONGEST = 1e7  # seconds, a third of a year: timers of the operating system refuse values far beyond
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NaturalInt = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1)]


class Block(BaseModel):
    """A mapping of the job file: unknown keys are errors, values are not coerced, instances are immutable."""

    # Only whole jobs are validated, so validators of single blocks are not built.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def default_of(block: type[Block], key: str) -> Any:
    """Returns the default value of a block's key.

    A run's own job.yaml states every key with its value, so "was it written" does not tell what the user chose.
    """
    return block.model_fields[key].get_default(call_default_factory=True)
