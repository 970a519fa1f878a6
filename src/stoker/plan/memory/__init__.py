"""Memory of a device, by component. `stoker_memory.py` is the entry; `memory_formulas.py` has those of the docs."""
