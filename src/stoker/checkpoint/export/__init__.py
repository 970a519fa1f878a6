"""Exports of a run: adapters, merged weights and GGUF, written and verified."""
