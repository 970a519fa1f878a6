"""A small module with data of its own, as text: what jobs of `task: module` in other processes import as ``made``."""

MADE = """
import os, time, torch
from torch import nn
def network():
    return nn.Sequential(nn.Linear(3, 8), BETWEEN, nn.Linear(8, 2)).double()
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        made = torch.Generator().manual_seed(number)
        sample = torch.randn(5, generator=made, dtype=torch.float64)
        return sample[:3], sample[3:]
def data():
    return Data()
"""


def made_module(between: str = "nn.Tanh()") -> str:
    """The module's source.

    Args:
        between: its middle layer.
    """
    return MADE.replace("BETWEEN", between)
