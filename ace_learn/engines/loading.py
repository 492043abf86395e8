"""From folders to an engine."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ace_learn.artifacts import JsonFields
from ace_learn.engines.costs import measure_costs
from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.hidden_drafter import HiddenDrafter
from ace_learn.engines.sampling import Sampling
from ace_learn.engines.signaller import HeadSignaller
from ace_learn.exit.policy import ExitPolicy
from ace_learn.heads.export import load_head, load_own_policy
from ace_learn.models.draft_files import draft_folder, load_draft, weights_sha256
from ace_learn.models.target import Target, TargetConfig, load_draft_model, load_target
from ace_learn.speculation.adaptive import AdaptiveConfig, AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter, DrafterConfig, DraftStates, NgramDrafter
from ace_learn.speculation.rules import AcceptanceConfig


def load_engine(
    model: str,
    *,
    head: str | Path | None = None,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    drafter: DrafterConfig | None = None,
    acceptance: AcceptanceConfig | None = None,
    adaptive: AdaptiveConfig | None = None,
) -> HFEngine:
    """Loads a target and, with a head folder, its learned exits.

    Args:
        model: Folder or hub id; `ace_learn/reasoner` is the embedded reasoner.
        head: Head folder with a policy; None: full thinking.
        sampling: How tokens are drawn.
        batch_size: Requests decoded together.
        drafter: What drafts tokens; None: no speculation.
        acceptance: When a drafted token is accepted; None: the lossless rule.
        adaptive: Whether only likely drafts are verified; None: all are.

    Raises:
        ValueError: A model cannot be loaded, the head belongs to another one, the policy to another head, the draft
            model has another tokenizer, or a part of the speculation would be ignored.
    """
    target = load_target(TargetConfig(model=model))
    folder = None if head is None else Path(head)
    return build_engine(
        target,
        head=folder,
        sampling=sampling,
        batch_size=batch_size,
        drafter=drafter,
        acceptance=acceptance,
        adaptive=adaptive,
    )


def build_engine(
    target: Target,
    *,
    head: Path | None,
    sampling: Sampling | None = None,
    batch_size: int = 64,
    drafter: DrafterConfig | None = None,
    acceptance: AcceptanceConfig | None = None,
    adaptive: AdaptiveConfig | None = None,
) -> HFEngine:
    """An engine on a loaded target; see `load_engine`.

    Raises:
        ValueError: The head belongs to another target, or its folder holds no policy, or another head's; the draft
            model cannot be loaded or has another tokenizer; or a part of the speculation would be ignored.
    """
    sampling = sampling or Sampling()
    config, acceptance, adaptive = drafter or DrafterConfig(), acceptance or AcceptanceConfig(), adaptive or _ALL
    _check_speculation(config, sampling, acceptance, adaptive)
    exits = _NO_EXITS if head is None else _exits(head, target, sampling)
    drafting = load_drafter(config, target, sampling, states_delay=exits.states_delay(config))
    _check_certified_drafter(exits, drafting)
    verifier = None
    if adaptive.enabled:
        assert drafting is not None, "checked above"
        verifier = AdaptiveVerifier(
            estimator=adaptive.estimator(config.draft_tokens, target.device),
            costs=measure_costs(target, drafting, batch_size=batch_size, draft_tokens=config.draft_tokens),
        )
    elif exits.reads_acceptance:
        verifier = AdaptiveVerifier(estimator=_ALL.estimator(config.draft_tokens, target.device), costs=None)
    return HFEngine(
        target,
        sampling=sampling,
        policy=exits.policy,
        signaller=exits.signaller,
        aux_layers=exits.aux_layers,
        drafter=drafting,
        num_draft_tokens=0 if drafting is None else config.draft_tokens,
        acceptance=acceptance,
        verifier=verifier,
        batch_size=batch_size,
    )


class _Exits(NamedTuple):
    """What a head folder gives."""

    policy: ExitPolicy | None
    signaller: HeadSignaller | None
    aux_layers: tuple[int, ...]
    states: DraftStates | None
    """Those that the head reads, or that its policy was certified with."""

    @property
    def reads_acceptance(self) -> bool:
        """Whether the policy reads the signal `acceptance`."""
        return self.policy is not None and "acceptance" in self.policy.signals

    def states_delay(self, drafter: DrafterConfig) -> int:
        """Positions between a row and the drafter's state that signals read of it; 0: none is read."""
        if self.states is not None:
            return self.states.delay
        return drafter.draft_tokens + 1 if self.reads_acceptance else 0


_NO_EXITS = _Exits(None, None, (), None)
_ALL = AdaptiveConfig()


def _exits(head: Path, target: Target, sampling: Sampling) -> _Exits:
    loaded = load_head(head, expect=target.identity)
    policy = load_own_policy(loaded)
    _warn_of_lost_certificate(policy, sampling)
    return _Exits(
        policy,
        HeadSignaller(loaded.head, loaded.spec, target.device),
        loaded.spec.aux_layers if "target_aux" in loaded.spec.sources else (),
        loaded.spec.draft or _certified_states(policy),
    )


def _certified_states(policy: ExitPolicy) -> DraftStates | None:
    """The drafter's states that the signal `acceptance` was computed from where the policy was certified."""
    certified = JsonFields.of(policy.certificate or {}, where="the policy's certificate")
    return DraftStates.from_json(certified.fields("draft")) if "draft" in certified.data else None


def _check_certified_drafter(exits: _Exits, drafter: Drafter | None) -> None:
    """Refuses another drafter than the one whose states a policy was certified with."""
    if exits.reads_acceptance and exits.states is not None and drafter is not None and drafter.states != exits.states:
        raise ValueError(
            f"the policy reads the signal acceptance of a drafter, {exits.states}, and drafter.model gives "
            f"{drafter.states}; decode with the drafter that the data set was built with"
        )


def _check_speculation(
    drafter: DrafterConfig, sampling: Sampling, acceptance: AcceptanceConfig, adaptive: AdaptiveConfig
) -> None:
    """Refuses what would be ignored, before anything is loaded."""
    if drafter.kind == "none" and (adaptive.enabled or not acceptance.is_lossless):
        raise ValueError("acceptance rules and adaptive verification do nothing without a drafter; name one")
    if adaptive.enabled and (drafter.kind == "ngram" or sampling.temperature == 0.0):
        raise ValueError(
            "adaptive verification scores draft probabilities: it needs a drafter that is a model, and a temperature "
            "above 0"
        )
    if sampling.temperature == 0.0 and not acceptance.is_lossless:
        warnings.warn(f"the acceptance rule {acceptance.rule} does nothing at temperature 0", stacklevel=3)


def load_drafter(config: DrafterConfig, target: Target, sampling: Sampling, *, states_delay: int = 0) -> Drafter | None:
    """The drafter that a recipe names; None where it names none.

    Args:
        config: Which drafter.
        target: The model that verifies.
        sampling: That of the engine.
        states_delay: Positions between a row and the drafter's state that signals read of it; 0: none is read.

    Raises:
        ValueError: It cannot be loaded, drafts for another target, is of another kind than the recipe says, or has no
            hidden states to give.
    """
    if config.kind in ("none", "ngram", "draft_model") and states_delay:
        raise ValueError(
            f"the drafter {config.kind} has no hidden states over verified tokens, which the features `draft` are and "
            "the signal `acceptance` is computed from; set drafter.kind eagle3 or mtp, and drafter.model"
        )
    if config.kind == "none":
        return None
    if config.kind == "ngram":
        return NgramDrafter()
    assert config.model is not None, "DrafterConfig sees to it"
    if config.kind == "draft_model":
        model = load_draft_model(config.model, target)
        return ModelDrafter(model, sampling=sampling, vocab_size=target.vocab_size)
    folder = draft_folder(config.model)
    module = load_draft(folder, target)
    if module.kind != config.kind:
        raise ValueError(
            f"{config.model} holds a draft of kind {module.kind}, not {config.kind}; set drafter.kind {module.kind}"
        )
    states = None
    if states_delay:
        size = module.config.block.hidden_size
        states = DraftStates(size=size, delay=states_delay, drafter=weights_sha256(folder))
    return HiddenDrafter(module, target, sampling=sampling, states=states)


def _warn_of_lost_certificate(policy: ExitPolicy, sampling: Sampling) -> None:
    """A certificate holds for the sampling of its probes alone (the seed does not matter), and for one estimator."""
    if policy.certificate is not None and "acceptance" in policy.signals:
        warnings.warn(
            "the exit policy's certificate does not hold here: it reads the signal acceptance, whose coefficients move "
            "with traffic and stood still where it was certified",
            stacklevel=4,
        )
    certified = policy.certificate and policy.certificate.get("sampling")
    if isinstance(certified, dict):
        used = {name: value for name, value in asdict(sampling).items() if name != "seed"}
        differing = [
            f"{name} {value}, certified for {certified.get(name)}"
            for name, value in used.items()
            if value != certified.get(name)
        ]
        if differing:
            warnings.warn(f"the exit policy's certificate does not hold here: {'; '.join(differing)}", stacklevel=4)
