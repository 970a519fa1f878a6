"""Generated questions of arithmetic with their answers: the rows of the catalogue's ``arithmetic``."""

from __future__ import annotations

import random
from collections.abc import Iterator

LARGEST = 20


def arithmetic_rows() -> Iterator[dict[str, str]]:
    """Every sum of two numbers from 1 to 20, and every difference that is not below 0, in an order that never changes.

    Each pair of numbers and sign is there once, so that rows that are held out are not trained on.
    """
    numbers = range(1, LARGEST + 1)
    sums = [(a, "+", b, a + b) for a in numbers for b in numbers]
    differences = [(a, "-", b, a - b) for a in numbers for b in numbers if b <= a]
    asked = sums + differences
    random.Random(0).shuffle(asked)
    for a, sign, b, result in asked:
        yield {"prompt": f"What is {a} {sign} {b}?", "expected": str(result)}
