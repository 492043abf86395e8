"""From folders to an engine."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import HeadSignaller, HFEngine
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy
from ace_learn.heads.export import load_head, load_own_policy
from ace_learn.models.target import Target, TargetConfig, load_draft_model, load_target
from ace_learn.speculation.drafters import Drafter, DrafterConfig, NgramDrafter


def load_engine(
    model: str,
    *,
    head: str | Path | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    drafter: DrafterConfig | None = None,
) -> HFEngine:
    """Loads a target and, with a head folder, its learned exits.

    Args:
        model: Folder or hub id; `ace_learn/reasoner` is the embedded reasoner.
        head: Head folder with a policy; None: full thinking.
        sampling: How tokens are drawn.
        batch_size: Requests decoded together.
        drafter: What drafts tokens; None: no speculation.

    Raises:
        ValueError: A model cannot be loaded, the head belongs to another one, the policy to another head, or the draft
            model has another tokenizer.
    """
    target = load_target(TargetConfig(model=model))
    folder = None if head is None else Path(head)
    return build_engine(target, head=folder, sampling=sampling, batch_size=batch_size, drafter=drafter)


def build_engine(
    target: Target,
    *,
    head: Path | None,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    drafter: DrafterConfig | None = None,
) -> HFEngine:
    """An engine on a loaded target; see `load_engine`.

    Raises:
        ValueError: The head belongs to another target, or its folder holds no policy, or another head's; or the draft
            model cannot be loaded or has another tokenizer.
    """
    sampling = sampling or Sampling()
    config = drafter or DrafterConfig()
    drafting = _drafter(config, target, sampling)
    draft_tokens = 0 if drafting is None else config.draft_tokens
    if head is None:
        return HFEngine(
            target, sampling=sampling, drafter=drafting, num_draft_tokens=draft_tokens, batch_size=batch_size
        )
    loaded = load_head(head, expect=target.identity)
    policy = load_own_policy(loaded)
    _warn_of_other_sampling(policy, sampling)
    return HFEngine(
        target,
        sampling=sampling,
        policy=policy,
        signaller=HeadSignaller(loaded.head, loaded.spec, target.device),
        aux_layers=loaded.spec.aux_layers if "target_aux" in loaded.spec.sources else (),
        drafter=drafting,
        num_draft_tokens=draft_tokens,
        batch_size=batch_size,
    )


def _drafter(config: DrafterConfig, target: Target, sampling: Sampling) -> Drafter | None:
    if config.kind == "none":
        return None
    if config.kind == "ngram":
        return NgramDrafter()
    assert config.model is not None, "DrafterConfig sees to it"
    model = load_draft_model(config.model, target)
    return ModelDrafter(model, sampling=sampling, vocab_size=target.vocab_size)


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
