"""Prefixes of the names of tensors in a checkpoint that are not weights or moments of one model."""

TABLES = "sparse/"  # all state of embedding tables
ROWS, BASE_ROWS = f"{TABLES}rows/", f"{TABLES}base/"  # rows, and those of the base that a checkpoint adds to
ISLAND, OUTER = "island-", "outer/"  # the state of all islands but the first, and of the outer step
POWER_SGD = "power-sgd/"  # PowerSGD's state, which fits no other layout
