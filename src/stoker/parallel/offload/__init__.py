"""Activations, optimizer states and idle tensors in host memory."""
