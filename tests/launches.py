"""Counts the operators of a block that compute or copy."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts operators other than views; on a GPU each launches a kernel, and a ``_foreach`` one a few.

    Attributes:
        count: operators so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        self.count += not operator.is_view
        return operator(*arguments, **(options or {}))
