"""Tables of the command line: nothing in a cell is cut, or taken for markup."""

from __future__ import annotations

import pytest

from stoker.cli.output.text_table import print_table


def test_cells_are_printed_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    name = "runs/" + "long-" * 30
    print_table(("run", ">step", "state"), [(name, "1", "done"), ("[red]a[/red]", "1,000", "failed")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f" {'run':<{len(name)}}  {'step':>5}  state",
        f" {name}  {1:>5}  done",
        f" {'[red]a[/red]':<{len(name)}}  1,000  failed",
    ]
