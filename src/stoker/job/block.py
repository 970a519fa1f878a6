"""What every block of the job file is made of: strict models, bounded numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
LARGEST = 2**31 - 1  # of counts: beyond what any run holds, and what every integer of the libraries below does
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NaturalInt = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1)]


class Block(BaseModel):
    """A mapping of the job file: unknown keys are errors, values are not coerced, nothing changes later."""

    # Only whole jobs are validated: validators of the blocks alone would be built for nothing.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)
