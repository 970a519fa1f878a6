"""The machine: which device, which arithmetic it is good at, how much memory is in use."""
