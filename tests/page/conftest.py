"""Pages over folders of made-up runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import PORT, ROLES, TOKENS, Browser

from stoker.page.page_settings import PageSettings, state_folder
from stoker.serve.named_keys import hash_of


@pytest.fixture
def make_page(tmp_path: Path) -> Callable[..., Browser]:
    """Makes a page; with ``users=True`` one with the users of `ROLES`."""

    def make(*, users: bool = False, host: str = "127.0.0.1", data: tuple[Path, ...] = (), **more: Any) -> Browser:
        (tmp_path / "runs").mkdir(exist_ok=True)
        file = tmp_path / "users"
        if users:
            file.write_text("".join(f"{name} {role} {hash_of(TOKENS[name])}\n" for name, role in ROLES.items()))
        settings = PageSettings(
            host=host,
            port=PORT,
            runs=((tmp_path / "runs").resolve(),),
            data=data,
            state=state_folder(tmp_path / "state"),
            base=tmp_path.resolve(),
            users=file if users else None,
            **more,
        )
        return Browser(settings)

    return make


@pytest.fixture
def page(make_page: Callable[..., Browser]) -> Browser:
    """A page of one person on loopback, whose session has begun."""
    return make_page().begin()
