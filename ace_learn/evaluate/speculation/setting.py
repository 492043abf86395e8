"""The pair of models that the studies of speculation decode with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.target import Target, TargetConfig, load_target
from ace_learn.speculation.adaptive import AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter, DrafterConfig
from ace_learn.speculation.rules import AcceptanceConfig
from ace_learn.tasks import Example, TaskConfig, build_task, render_prompt


@dataclass(frozen=True, kw_only=True)
class NoisedDraft:
    """A copy of the target with noise on its weights: a drafter for targets that have none."""

    noise: float = 0.3
    """Standard deviation of the noise, in those of each weight; 0.1 accepts nearly all, 0.4 a fifth."""
    draft_tokens: int = 4
    """Draft length, K."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.noise < 0.0 or self.draft_tokens < 1:
            raise ValueError(f"need noise >= 0 and draft_tokens >= 1, not {self.noise} and {self.draft_tokens}")


@dataclass(frozen=True, kw_only=True)
class SpeculationSetting:
    """Target, drafter and problems of a study."""

    target: TargetConfig = TargetConfig(model="ace_learn/reasoner", dtype="float32", device="cpu")
    """The model that verifies."""
    drafter: DrafterConfig = DrafterConfig()
    """What drafts; kind none: a copy of the target with noise on its weights (`noised`)."""
    noised: NoisedDraft = NoisedDraft()
    """The noised copy."""
    task: TaskConfig = TaskConfig(name="reasoner")
    """Where the problems come from."""
    max_new_tokens: int = 480
    """Cap on a request's output."""
    max_answer_tokens: int = 48
    """Cap on its answer."""
    seed: int = 30_000
    """Which problems, and which noise."""

    def __post_init__(self) -> None:
        """Refuses what would be ignored, and drafters without probabilities."""
        if self.drafter.kind == "ngram":
            raise ValueError("the studies need draft probabilities, which ngram does not give; name another drafter")
        if self.drafter.kind != "none" and self.noised != NoisedDraft():
            raise ValueError("noised would be ignored with a drafter; leave one of them out")

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self.noised.draft_tokens if self.drafter.kind == "none" else self.drafter.draft_tokens


class Pair:
    """A target with its drafter, and engines on them."""

    def __init__(self, setting: SpeculationSetting) -> None:
        """Loads the models; a small one is run on a single thread."""
        self.setting = setting
        self.target = load_target(setting.target)
        if self.target.device.type == "cpu":
            torch.set_num_threads(1)
        self.noised = noised_copy(self.target, setting.noised.noise) if setting.drafter.kind == "none" else None

    def drafter(self, sampling: Sampling) -> Drafter:
        """The drafter, drawing with a sampling of its own."""
        if self.noised is not None:
            return ModelDrafter(self.noised, sampling=sampling, vocab_size=self.target.vocab_size)
        drafter = load_drafter(self.setting.drafter, self.target, sampling)
        assert drafter is not None, "SpeculationSetting sees to it"
        return drafter

    def engine(
        self,
        sampling: Sampling,
        *,
        drafter: Drafter | None = None,
        acceptance: AcceptanceConfig | None = None,
        verifier: AdaptiveVerifier | None = None,
        batch_size: int = 64,
        draft_tokens: int | None = None,
    ) -> HFEngine:
        """An engine that speculates; `drafter` replaces the pair's own, `draft_tokens` its K, which may be 0."""
        most = self.setting.draft_tokens if draft_tokens is None else draft_tokens
        return HFEngine(
            self.target,
            sampling=sampling,
            drafter=(drafter or self.drafter(sampling)) if most else None,
            num_draft_tokens=most,
            acceptance=acceptance,
            verifier=verifier,
            batch_size=batch_size,
        )

    def problems(self, count: int, *, families: Sequence[str] | None = None) -> tuple[list[Example], list[Request]]:
        """Problems of the task, or of some families of the embedded reasoner, as requests."""
        task = self.setting.task if families is None else TaskConfig(name="reasoner", families=tuple(families))
        examples = list(build_task(task).examples(count, self.setting.seed))
        return examples, [self._request(key, example) for key, example in enumerate(examples)]

    def _request(self, key: int, example: Example) -> Request:
        prompt = render_prompt(self.target.tokenizer, example.messages, thinking=True, markers=self.target.markers)
        return Request(
            key=key,
            prompt_ids=tuple(prompt),
            contract=example.contract,
            max_new_tokens=self.setting.max_new_tokens,
            max_answer_tokens=self.setting.max_answer_tokens,
        )


def noised_copy(target: Target, noise: float) -> Target:
    """The target with Gaussian noise on every weight, always the same one."""
    model, draw = copy.deepcopy(target.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=draw).to(weight.device, weight.dtype)
            weight.add_(noise * weight.std() * drawn)
    return Target(model, target.tokenizer, target.markers, name=f"{target.identity.name} with noise {noise:g}")
