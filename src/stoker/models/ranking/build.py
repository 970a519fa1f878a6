"""The ranking models by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from stoker.models.ranking.dcn import DCN
from stoker.models.ranking.deepfm import DeepFM
from stoker.models.ranking.din import DIN
from stoker.models.ranking.dlrm import DLRM
from stoker.models.ranking.esmm import ESMM
from stoker.models.ranking.mmoe import MMoE
from stoker.models.ranking.model_inputs import RankingShape
from stoker.models.ranking.ple import PLE
from stoker.models.ranking.two_tower import TwoTower
from stoker.models.ranking.wide_deep import WideDeep

MODELS: dict[str, Callable[[RankingShape], nn.Module]] = {
    "dlrm": DLRM,
    "dcn": DCN,
    "deepfm": DeepFM,
    "wide-deep": WideDeep,
    "din": DIN,
    "mmoe": MMoE,
    "ple": PLE,
    "esmm": ESMM,
    "two-tower": TwoTower,
}
