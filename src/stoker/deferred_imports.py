"""Imports of libraries that few processes need, left out of the imports of others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType


class PeftWithoutBitsandbytes:
    """Hides bitsandbytes from ``peft.helpers``, which imports it for a function that Stoker does not use.

    bitsandbytes imports torch's compiler, and takes a fifth of the imports of a training process. Quantised layers
    import it themselves.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Finds nothing itself.

        Raises:
            ImportError: for that import; peft expects it where bitsandbytes is not installed.
        """
        if name != "bitsandbytes":
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("importlib"):
            frame = frame.f_back
        if frame.f_globals.get("__name__") == "peft.helpers":
            raise ImportError("left to quantised layers", name=name)


sys.meta_path.insert(0, PeftWithoutBitsandbytes())
