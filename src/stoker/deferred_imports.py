"""Imports of libraries that few processes need, left until they are used.

Some modules of peft, transformers and accelerate import another library when they are imported, for a function that
most processes never call. Together these libraries take a quarter of the imports of a training process.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from functools import reduce
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Modules, or packages of them, and what each imports for functions alone.
LEFT = {
    "accelerate.commands.config.sagemaker": "boto3",
    "peft.helpers": "bitsandbytes",  # imports torch's compiler
    "transformers.loss": "scipy.optimize",  # matches boxes in pictures
    "transformers.quantizers.quantizer_torchao": "torchao.prototype.safetensors.safetensors_support",
}


class Later:
    """A module, or something in it, that is imported when it is called."""

    def __init__(self, module: str, *names: str) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return Later(self._module, *self._names, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        found: Any = reduce(getattr, self._names, import_module(self._module))
        return found(*arguments, **keywords)


class WithLater(Loader):
    """Loads a module that gets `Later` for one of its own imports, unless that has been imported."""

    def __init__(self, loader: Loader, other: str) -> None:
        self._loader, self._other = loader, other

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # which gives its source, for one
        own = dict(vars(builtins))

        def importing(name: str, *more: Any, **named: Any) -> Any:
            if name != self._other or name in sys.modules or PathFinder.find_spec(name.partition(".")[0]) is None:
                return builtins.__import__(name, *more, **named)
            return Later(name)

        own["__import__"] = importing  # of this module's code alone, whatever others import meanwhile
        vars(module)["__builtins__"] = own
        try:
            self._loader.exec_module(module)
        finally:
            own["__import__"] = builtins.__import__


class LaterFinder:
    """Finds the modules that `LEFT` names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        other = LEFT.get(name) or LEFT.get(name.rpartition(".")[0])
        if other is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = WithLater(spec.loader, other)
        return spec


sys.meta_path.insert(0, LaterFinder())
