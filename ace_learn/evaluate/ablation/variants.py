"""Which variants a recipe asks for, what they are called, and whether the data set can answer."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ace_learn.artifacts import read_fields
from ace_learn.evaluate.ablation.config import AblateConfig, FixedPolicy, GroupConfig, ReferenceConfig, Smoothing
from ace_learn.evaluate.learned import PolicyFamily
from ace_learn.exit.policy import SmoothOver
from ace_learn.features import SPLITS
from ace_learn.signals import sources_of

REFERENCE = "reference"
"""Name of the variant that all others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A head and the policies on its signals.

    Attributes:
        name: how it differs from the reference.
        head: name of the head.
        policy: the candidates of which calibration chooses one, or a policy that is taken as it is.
    """

    name: str
    head: str
    policy: PolicyFamily | FixedPolicy

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that its policies read."""
        return tuple(self.policy.thresholds) if isinstance(self.policy, FixedPolicy) else self.policy.signals

    @property
    def smoothing(self) -> tuple[float, SmoothOver]:
        """Weight of the newest value, and what the moving average runs over."""
        if isinstance(self.policy, FixedPolicy):
            return self.policy.smoothing.ewma, self.policy.smoothing.over
        return self.policy.ewma, self.policy.smooth_over


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that will be replayed.

    Attributes:
        variants: by name, the reference first; a variant that several groups ask for stands here once.
        groups: names of each group's variants, in the order of its lists.
        fixed: names of the variants with given thresholds.
    """

    variants: dict[str, Variant]
    groups: dict[str, tuple[str, ...]]
    fixed: tuple[str, ...]


def subsets(signals: Sequence[str]) -> list[tuple[str, ...]]:
    """Every non-empty set of the signals, small ones first, each in the given order."""
    sizes = range(1, len(signals) + 1)
    return [subset for size in sizes for subset in itertools.combinations(signals, size)]


def plan_variants(config: AblateConfig) -> Plan:
    """Expand the groups of a recipe.

    Raises:
        ValueError: a combination that no policy can have, or a group that lists a variant twice.
    """
    reference = config.reference
    variants = {REFERENCE: Variant(name=REFERENCE, head=reference.head, policy=reference.policy)}
    groups: dict[str, tuple[str, ...]] = {}
    for key, group in config.groups.items():
        found = list(_expand(group, reference))
        names = tuple(variant.name for variant in found)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the group {key!r} asks for the variant {twice[0]!r} more than once")
        groups[key] = names
        variants |= {variant.name: variant for variant in found}
    fixed = {f"{key} (constants)": policy for key, policy in config.fixed.items()}
    for name, policy in fixed.items():
        policy.policy()  # refused here rather than after the heads are trained
        variants[name] = Variant(name=name, head=policy.head, policy=policy)
    return Plan(variants=variants, groups=groups, fixed=tuple(fixed))


def _expand(group: GroupConfig, reference: ReferenceConfig) -> Iterator[Variant]:
    """Every combination of a group's lists."""
    policy = reference.policy
    combinations = itertools.product(
        group.heads or (reference.head,),
        group.signals or subsets(group.subsets_of) or (policy.signals,),
        group.predicates or (policy.predicate,),
        group.smoothing or (Smoothing(ewma=policy.ewma, over=policy.smooth_over),),
        group.patience or (policy.patience,),
        group.min_thinking_tokens or (policy.min_thinking_tokens,),
    )
    for head, signals, predicate, smoothing, patience, minimum in combinations:
        # Only the score model has a label, so that the reference's own is not carried over to the other predicates.
        own = policy.label if predicate == "score" else "matches"
        for label in group.labels or (own,):
            family = replace(
                policy,
                signals=signals,
                predicate=predicate,
                label=label,
                ewma=smoothing.ewma,
                smooth_over=smoothing.over,
                patience=patience,
                min_thinking_tokens=minimum,
            )
            yield Variant(name=variant_name(head, family, reference), head=head, policy=family)


def variant_name(head: str, family: PolicyFamily, reference: ReferenceConfig) -> str:
    """How a variant differs from the reference, in words; `reference` if it does not."""
    policy = reference.policy
    smoothed = (family.ewma, family.smooth_over)
    differences = [
        (head != reference.head, f"head {head}"),
        (family.signals != policy.signals, f"signals {' + '.join(family.signals)}"),
        (family.predicate != policy.predicate, f"predicate {family.predicate}"),
        (family.label != policy.label and family.predicate == "score", f"label {family.label}"),
        (
            smoothed != (policy.ewma, policy.smooth_over),
            "no smoothing" if family.ewma == 1.0 else f"ewma {family.ewma} over {family.smooth_over}",
        ),
        (family.patience != policy.patience, f"patience {family.patience}"),
        (
            family.min_thinking_tokens != policy.min_thinking_tokens,
            f"at least {family.min_thinking_tokens} tokens",
        ),
    ]
    return ", ".join(text for differs, text in differences if differs) or REFERENCE


class _Holdings(NamedTuple):
    """What a data set holds, or will hold."""

    rows: str
    sources: tuple[str, ...]
    sizes: dict[str, object]

    def lacking(self, needed: Sequence[str]) -> str:
        """Those of some sources that it lacks, in words; empty where it lacks none."""
        return ", ".join(source for source in needed if source not in self.sources)


def _holdings(config: AblateConfig) -> _Holdings:
    if config.build is not None:
        features = config.build.features
        return _Holdings(features.rows, features.sources, dict(config.build.splits))
    path = config.data / "dataset.json"
    if not path.is_file():
        raise ValueError(f"{config.data} is not a finished data set: it has no dataset.json; run build first")
    dataset = read_fields(path)
    sources = dataset.fields("features").texts("sources")
    return _Holdings(dataset.text("rows"), sources, dict(dataset.fields("splits").data))


def check_data(config: AblateConfig, plan: Plan) -> None:
    """Refuse a recipe that its data set cannot answer, before anything is built or trained.

    Raises:
        ValueError: a split, a feature source, or the rows of all tokens are missing, or there is no data set.
    """
    data = _holdings(config)
    empty = [split for split in SPLITS if not data.sizes.get(split)]
    if empty:
        raise ValueError(f"an ablation needs problems in all four splits, and {', '.join(empty)} has none")
    held = f"the data set holds only {', '.join(data.sources)}: build with these features.sources"
    for name, head in config.heads.items():
        if lacking := data.lacking(head.sources):
            raise ValueError(f"the head {name!r} reads {lacking}, and {held}, or change the head")
        if head.rows == "all" and data.rows != "all":
            raise ValueError(
                f"the head {name!r} trains on all rows, and the data set keeps boundaries only: build with "
                "features.rows all, or train on boundaries"
            )
        if head.minimal == "stable" and config.build is not None and config.build.probing.strategy == "first":
            raise ValueError(
                f"the head {name!r} needs the stable boundary, and probing.strategy `first` leaves out the probes "
                "behind the first match: choose another strategy, or minimal `first`"
            )
    for variant in plan.variants.values():
        for signal, needed in sources_of(variant.signals).items():
            if lacking := data.lacking(needed):
                raise ValueError(
                    f"the variant {variant.name!r} reads the signal {signal}, which is computed from {lacking}, and "
                    f"{held}, or leave the signal out"
                )
        ewma, over = variant.smoothing
        if ewma < 1.0 and over == "tokens" and data.rows != "all":
            raise ValueError(
                f"the variant {variant.name!r} smooths over tokens, and the data set keeps boundaries only: build with "
                "features.rows all, or smooth over boundaries"
            )
