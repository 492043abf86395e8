"""Recipes of ablations for tests."""

from collections.abc import Mapping
from pathlib import Path

from ace_learn.evaluate.ablation.config import AblateConfig, GroupConfig, HeadVariant, ReferenceConfig
from ace_learn.evaluate.learned import PolicyFamily

_FAMILY = PolicyFamily()


def recipe(
    *,
    heads: Mapping[str, HeadVariant] | tuple[str, ...] = ("reference",),
    groups: Mapping[str, GroupConfig] = {},
    policy: PolicyFamily = _FAMILY,
    **options: object,
) -> AblateConfig:
    """A recipe on a data set that need not be there."""
    return AblateConfig(
        **{
            "output": Path("nowhere"),
            "dataset": Path("no-data"),
            "heads": dict(heads) if isinstance(heads, Mapping) else dict.fromkeys(heads, HeadVariant()),
            "groups": dict(groups),
            "reference": ReferenceConfig(policy=policy),
        }
        | options
    )
