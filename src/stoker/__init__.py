"""Stoker trains large models from one short YAML file.

From Python, any torch module: ``stoker.Trainer(model=..., loss=..., data=...).fit()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker import deferred_imports as deferred_imports  # before any import of peft

if TYPE_CHECKING:
    from stoker.train.trainer import FitResult, Trainer

__all__ = ["FitResult", "Trainer"]


def __getattr__(name: str) -> Any:
    """Loads a public name on first access, as `import stoker` must not wait for torch."""
    if name in __all__:
        from stoker.train import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
