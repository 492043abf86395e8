"""From folders to an engine."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

from ace_learn.engines.hf import HeadSignaller, HFEngine
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy
from ace_learn.heads.export import load_head, load_own_policy
from ace_learn.models.target import Target, TargetConfig, load_target
from ace_learn.speculation.drafters import NgramDrafter


def load_engine(
    model: str,
    *,
    head: str | Path | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    draft_tokens: int = 0,
) -> HFEngine:
    """Loads a target and, with a head folder, its learned exits.

    Args:
        model: Folder or hub id; `ace_learn/reasoner` is the embedded reasoner.
        head: Head folder with a policy; None: full thinking.
        sampling: How tokens are drawn.
        batch_size: Requests decoded together.
        draft_tokens: Draft length of the n-gram drafter; 0: no speculation.

    Raises:
        ValueError: The model cannot be loaded, the head belongs to another one, or the policy to another head.
    """
    target = load_target(TargetConfig(model=model))
    folder = None if head is None else Path(head)
    return build_engine(target, head=folder, sampling=sampling, batch_size=batch_size, draft_tokens=draft_tokens)


def build_engine(
    target: Target,
    *,
    head: Path | None,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    draft_tokens: int = 0,
) -> HFEngine:
    """An engine on a loaded target; see `load_engine`.

    Raises:
        ValueError: The head belongs to another target, or its folder holds no policy, or another head's.
    """
    drafter = NgramDrafter() if draft_tokens else None
    if head is None:
        return HFEngine(
            target, sampling=sampling, drafter=drafter, num_draft_tokens=draft_tokens, batch_size=batch_size
        )
    loaded = load_head(head, expect=target.identity)
    policy = load_own_policy(loaded)
    _warn_of_other_sampling(policy, sampling or Sampling())
    return HFEngine(
        target,
        sampling=sampling,
        policy=policy,
        signaller=HeadSignaller(loaded.head, loaded.spec, target.device),
        aux_layers=loaded.spec.aux_layers if "target_aux" in loaded.spec.sources else (),
        drafter=drafter,
        num_draft_tokens=draft_tokens,
        batch_size=batch_size,
    )


def _warn_of_other_sampling(policy: ExitPolicy, sampling: Sampling) -> None:
    """A certificate holds for the sampling of its probes alone (the seed does not matter)."""
    certified = policy.certificate and policy.certificate.get("sampling")
    if isinstance(certified, dict):
        used = {name: value for name, value in asdict(sampling).items() if name != "seed"}
        differing = [
            f"{name} {value}, certified for {certified.get(name)}"
            for name, value in used.items()
            if value != certified.get(name)
        ]
        if differing:
            warnings.warn(f"the exit policy's certificate does not hold here: {'; '.join(differing)}", stacklevel=3)
