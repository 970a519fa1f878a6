"""Generated arithmetic questions with their answers: the rows of the catalogue's ``arithmetic``."""

from __future__ import annotations

import random
from collections.abc import Iterator

LARGEST = 20


def arithmetic_rows() -> Iterator[dict[str, str]]:
    """Yields every sum of two numbers from 1 to 20 and every non-negative difference, in a fixed order.

    Each pair of numbers and sign occurs once, so held-out rows are never trained on.
    """
    numbers = range(1, LARGEST + 1)
    sums = [(a, "+", b, a + b) for a in numbers for b in numbers]
    differences = [(a, "-", b, a - b) for a in numbers for b in numbers if b <= a]
    asked = sums + differences
    random.Random(0).shuffle(asked)
    for a, sign, b, result in asked:
        yield {"prompt": f"What is {a} {sign} {b}?", "expected": str(result)}
