"""Shapes of models from a name, a folder or a configuration, without weights."""

from stoker.plan.shapes.find_shape import shape_of_model
from stoker.plan.shapes.model_names import known_shape, shape_named
from stoker.plan.shapes.shape_of_config import shape_of_config

__all__ = ["known_shape", "shape_named", "shape_of_config", "shape_of_model"]
