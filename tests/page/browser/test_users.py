"""Users are added, changed and removed; removed files come back or are deleted for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from served_page import PATIENCE, ServedPage, View, rows

from stoker.serve.named_keys import add_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("warm_processes")]  # a browser
ROLES = ("see", "run", "admin")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[ServedPage, str]]:
    """A page with a file of users, and the token of its admin."""
    (tmp_path / "own").mkdir()
    token = add_key(tmp_path / "own/users", "boss", "admin", ROLES)
    page = ServedPage(tmp_path / "own", ["--users", "users"])
    yield page, token
    page.stop()


def sign_in(view: View, token: str) -> Page:
    page = view.open("#/start?lang=en")
    page.locator("#token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("nav.rail")).to_be_visible()
    return page


def test_a_user_is_added_changed_and_removed(
    own: tuple[ServedPage, str], open_view: Callable[..., View], tmp_path: Path
) -> None:
    served, token = own
    view = open_view(served)
    page = sign_in(view, token)
    page.get_by_role("link", name="boss (administrator)").click()
    page.locator("#user-name").fill("new")
    page.locator("#add-user").click()
    made = page.locator('[data-token="new"]').inner_text()
    view.shots("users")
    other = sign_in(open_view(served), made)
    expect(other.locator(".who")).to_have_text("new (may look)")
    expect(other.locator(".who a")).to_have_count(0)
    page.get_by_label("Role of new").select_option("run")
    page.get_by_role("button", name="Change the role", exact=True).click()
    expect(page.get_by_role("button", name="Change the role", exact=True)).to_have_count(0)
    until = time.monotonic() + PATIENCE / 1000  # the button goes as soon as it is pressed
    while "new run " not in (tmp_path / "own/users").read_text():
        assert time.monotonic() < until
        time.sleep(0.1)
    other.reload()
    expect(other.locator(".who")).to_have_text("new (may run)")
    page.get_by_label("Role of boss").select_option("see")
    page.get_by_role("button", name="Change the role", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("boss is the only admin")
    page.get_by_role("button", name="Remove new", exact=True).click()
    page.get_by_role("button", name="Yes, remove", exact=True).click()
    expect(page.get_by_role("button", name="Remove new", exact=True)).to_have_count(0)
    other.reload()
    expect(other.locator("#token")).to_be_visible()
    expect(page.get_by_role("cell", name="remove user")).to_be_visible()  # in the audit log


def test_a_removed_file_comes_back_or_goes_for_good(view: View, tmp_path: Path, served: ServedPage) -> None:
    page = view.open("#/data//files?lang=en")
    page.set_input_files("#data-file", rows(tmp_path / "gone.jsonl", 5))
    row = page.get_by_role("row", name="gone.jsonl")
    uploads = served.base / "state/uploads"
    for kept in (True, False):
        row.get_by_role("button", name="Remove", exact=True).click()
        aside = page.locator("details", has_text="1 file was removed")
        aside.locator("summary").click()
        expect(aside.get_by_role("row", name="gone.jsonl")).to_be_visible()
        if kept:
            view.shots("removed")
        if kept:
            aside.get_by_role("button", name="Bring back", exact=True).click()
            expect(aside).to_have_count(0)
    aside.get_by_role("button", name="Delete for good", exact=True).click()
    assert list(uploads.glob("removed-*/gone.jsonl"))  # not before it was confirmed
    aside.get_by_role("button", name="Yes, delete it", exact=True).click()
    expect(aside).to_have_count(0)
    assert not list(uploads.glob("*/gone.jsonl"))
