"""Shapes from a name, a folder or a configuration: what a model is, without its weights."""

from stoker.plan.shapes.config import shape_of_config
from stoker.plan.shapes.find import shape_of_model
from stoker.plan.shapes.names import known_shape, shape_named

__all__ = ["known_shape", "shape_named", "shape_of_config", "shape_of_model"]
