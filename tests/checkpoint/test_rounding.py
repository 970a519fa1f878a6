"""Bounds of the rounding of GGUF's quantised types, against the package gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from stoker.checkpoint.export.rounding import check_stored
from stoker.errors import RunFailed


@pytest.mark.parametrize("size", [1.0, 1e-6])
@pytest.mark.parametrize("form", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_gguf_rounds_within_the_bound(form: str, size: float) -> None:
    kind = GGMLQuantizationType[form.upper()]
    torch.manual_seed(0)
    trained = torch.randn(64, 128).pow(3) * size  # outliers, as trained weights have
    trained[0, :32] = torch.linspace(-1, 1, 32) * size  # both ends of a group are largest
    trained[1] = 0.0
    stored = torch.from_numpy(dequantize(quantize(trained.numpy().astype(np.float32), kind), kind).copy())
    check_stored("weight", trained, stored, form)
    for wrong in (stored * 1.2, stored * 0.8, stored.roll(1, 0), torch.zeros_like(stored)) if size == 1.0 else ():
        with pytest.raises(RunFailed, match="differs"):
            check_stored("weight", trained, wrong, form)
