"""Memory that idles: bytes leave and come back to the same tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.parallel.offload import idle_offload
from stoker.parallel.offload.idle_offload import IdleOffload


def test_bytes_leave_and_come_back_to_the_same_tensors_and_views() -> None:
    whole = torch.arange(12.0)
    view, other = whole[4:8].view(2, 2), torch.ones(3, dtype=torch.bfloat16)
    idle = IdleOffload(lambda: [whole, view, other])
    with idle.away():
        assert whole.untyped_storage().size() == other.untyped_storage().size() == 0
    assert torch.equal(whole, torch.arange(12.0)) and torch.equal(view, torch.arange(4.0, 8.0).view(2, 2))
    view.zero_()
    assert whole[4:8].sum() == 0 and other.sum() == 3


def test_an_optimizer_goes_on_to_the_bit() -> None:
    def trained(*, idles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        idle = IdleOffload(
            lambda: [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        )
        for step in range(4):
            if idles:
                with idle.away():
                    states = [state["exp_avg"] for state in optimizer.state.values()]
                    assert len(states) == 2 * (step > 0) and not any(s.untyped_storage().size() for s in states)
            model(torch.full((2, 4), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for one, other in zip(trained(idles=True), trained(idles=False), strict=True):
        assert torch.equal(one, other)


def test_bytes_come_back_after_an_error_and_leave_again_after_use() -> None:
    held = torch.ones(5)
    idle = IdleOffload(lambda: [held])
    with pytest.raises(ValueError, match="inside"), idle.away():
        raise ValueError("inside")
    assert held.sum() == 5
    idle.leave()
    with idle.here():
        assert held.sum() == 5
    assert held.untyped_storage().size() == 0


def test_host_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is page-locked, which takes seconds, without the reserve of torch's own allocator."""
    taken: list[int] = []

    def counted(tensor: torch.Tensor, owner: object) -> torch.Tensor:
        assert owner is idle  # it is unlocked after the last use
        taken.append(tensor.nbytes)
        return torch.empty_like(tensor)

    monkeypatch.setattr(idle_offload, "host_memory_like", counted)
    monkeypatch.setattr(idle_offload, "_is_kept", lambda host: True)
    held = [torch.ones(5), torch.full((5,), 2.0), torch.ones(3)]
    idle = IdleOffload(lambda: held)
    for _ in range(3):
        with idle.away():
            pass
        assert [float(x.sum()) for x in held] == [5, 10, 3]
    assert taken == [20, 20, 12]
