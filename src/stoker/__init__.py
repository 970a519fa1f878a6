"""Stoker trains large models from one short YAML file."""
