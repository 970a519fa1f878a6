"""Buckets of replicated modules: the same in all steps, and in the order in which gradients are ready."""

# Annotations are types here and not strings, as DistributedDataParallel checks those of its hook.
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.job.layout import Compress, Layout
from stoker.launch.process_pool import Pool
from stoker.parallel.data_parallel import replicate as replication
from stoker.parallel.mesh import Mesh

WIDTH, LAYERS = 401, 10  # 6 MB of weights: more than one bucket


def model_of(unused: bool, compress: Compress) -> replication.Replicated:
    """Linear layers of which the second is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model[1].requires_grad_(requires_grad=False)
    layout = Layout(data=dist.get_world_size(), compress=compress)
    return replication.replicate(model, Mesh(layout, torch.device("cpu")), may_be_unused=unused)


def gradients(unused: bool, compress: Compress, passes: int) -> list[list[Tensor]]:
    """Returns the gradients of three equal steps."""
    model = model_of(unused, compress)
    torch.manual_seed(1 + dist.get_rank())
    rows = torch.randn(passes, 4, WIDTH)
    return [step(model, rows) for _ in range(3)]


def step(model: replication.Replicated, rows: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    with model.no_sync():
        for some in rows[:-1]:
            model(some).square().sum().backward()
    model(rows[-1]).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("unused", "compress", "passes"),
    [(False, "none", 1), (False, "none", 3), (False, "bf16", 1), (True, "none", 1)],
)
def test_the_first_step_has_the_bits_of_the_others(pool: Pool, unused: bool, compress: Compress, passes: int) -> None:
    """Otherwise a run would depend on where it was restarted: sums of three depend on where a bucket is cut."""
    for first, *others in pool.run(gradients, unused, compress, passes, world=3):
        assert len(first) == 2 * (LAYERS - 1)
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def layers_of_buckets(unused: bool) -> list[list[set[int]]]:
    """Returns the layers of each bucket of two steps, as they are summed."""
    found: list[list[set[int]]] = []
    layers: dict[Tensor, int] = {}
    own_sum = replication._sum

    def record(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found[-1].append({layers[parameter] for parameter in bucket.parameters()})
        return own_sum(group, bucket)

    with patch("stoker.parallel.data_parallel.replicate._sum", record):
        model = model_of(unused, "none")
    layers |= {parameter: int(name.split(".")[0]) for name, parameter in model.module.named_parameters()}
    for _ in range(2):
        found.append([])
        step(model, torch.ones(1, 2, WIDTH))
    return found


@pytest.mark.parametrize("unused", [False, True])
def test_buckets_of_all_steps_begin_with_the_last_layers(pool: Pool, unused: bool) -> None:
    """The first bucket that is full is summed during the rest of the backward pass."""
    for first, second in pool.run(layers_of_buckets, unused, world=2):
        assert first == second and len(first) > 1
        assert set.union(*first) == set(range(LAYERS)) - {1}
        for bucket, later in pairwise(first):
            assert min(bucket) >= max(later)
