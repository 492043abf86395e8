"""Signal heads: architectures, losses, training, metrics and the head folder.

What serving needs is exported here and imports neither Lightning nor scikit-learn. Training is `ace_learn.heads.train`,
metrics are `ace_learn.heads.metrics`.
"""

from ace_learn.heads.config import OptimizerConfig, TrainConfig, TrainerConfig
from ace_learn.heads.export import HeadCard, LoadedHead, load_head, load_own_policy, save_head
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.heads.losses import LossWeights
from ace_learn.heads.weighting import WeightingConfig

__all__ = [
    "HeadCard",
    "HeadConfig",
    "LoadedHead",
    "LossWeights",
    "OptimizerConfig",
    "SignalHead",
    "TrainConfig",
    "TrainerConfig",
    "WeightingConfig",
    "load_head",
    "load_own_policy",
    "save_head",
]
