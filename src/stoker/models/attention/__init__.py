"""Attention over packed rows and over pages, and the kernels that compute it."""
