"""Responses to steps that go wrong, to memory that runs out, and to signals."""
