"""Keys that offload weights, optimizer states or activations to the host's memory."""

from __future__ import annotations

from stoker.job.importers.config_reader import ConfigReader

NOT_OFFLOADED = "nothing is offloaded, as by Stoker's default"


def carry_offload(config: ConfigReader, key: str, part: str) -> None:
    """Carries the offload target of parameters (``param``) or of the optimizer's states (``optimizer``)."""
    device = config.text(key)
    if device == "cpu" and config.sets("parallel.offload"):
        config.drop(key, "`offload: params` holds the optimizer's states too")
    elif device == "cpu":
        both = part == "param"
        config.carry(key, "parallel.offload", "params" if both else part, "optimizer states too" if both else "")
    elif device == "nvme":
        config.drop(key, "Stoker offloads to the host's memory only", matters=True)
    elif device is not None:
        config.drop(key, NOT_OFFLOADED)


def carry_activation_offload(config: ConfigReader, key: str) -> None:
    """Carries a flag that offloads activations."""
    if config.flag(key) and config.sets("parallel.offload"):
        config.drop(key, "`offload` names one kind of state", matters=True)
    else:
        config.switch(key, "parallel.offload", "activations", off=NOT_OFFLOADED)
