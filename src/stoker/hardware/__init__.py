"""The machine: its devices, their best precision, and memory in use."""
