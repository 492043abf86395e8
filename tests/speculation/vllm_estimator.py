"""Runs vLLM's own acceptance estimator, its Triton kernels interpreted on the CPU, next to ours; prints both as JSON.

A process of its own, since the interpreter must be chosen before triton is imported.
"""

import json
import math
import os
from types import SimpleNamespace

import torch

BATCH, K, VOCAB, INTERVAL, REFITS = 8, 4, 5000, 10, 5


def main():
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=driver))
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator as Reference

    from ace_learn.speculation.estimator import OnlineAcceptanceEstimator

    seen = {}
    for name, batches in (("synthetic", synthetic()), ("real", real())):
        reference = Reference(BATCH, K, torch.device("cpu"))
        reference.REFIT_INTERVAL = INTERVAL
        seen[name] = compare(reference, OnlineAcceptanceEstimator(num_positions=K, refit_interval=INTERVAL), batches)
    print(json.dumps(seen))


def synthetic():
    """Logits, temperatures, accepted and drafted counts of steps whose acceptance follows a known law."""
    from ace_learn.speculation.estimator import log_odds

    draw = torch.Generator().manual_seed(0)
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.3] * (BATCH // 4))
    for _ in range(INTERVAL * REFITS):
        logits = torch.randn(BATCH, K, VOCAB, generator=draw) * torch.rand(BATCH, K, 1, generator=draw) * 4
        features = torch.stack([log_odds(row, float(t)) for row, t in zip(logits, temperature, strict=True)])
        drafted = torch.randint(0, K + 1, (BATCH,), generator=draw)
        accepts = torch.rand(BATCH, K, generator=draw) < torch.sigmoid(0.9 * features + 1.5)
        yield logits, temperature, torch.minimum(accepts.long().cumprod(1).sum(1), drafted), drafted


def real():
    """The same of the embedded reasoner with its EAGLE-3 drafter; logits are any that have the recorded feature."""
    from ace_learn.evaluate.speculation.events import FEATURES, collect
    from ace_learn.evaluate.speculation.setting import Pair, SpeculationSetting
    from ace_learn.speculation.drafters import DrafterConfig

    drafter = DrafterConfig(kind="eagle3", model="ace_learn/reasoner-eagle3", draft_tokens=K)
    pair = Pair(SpeculationSetting(drafter=drafter))
    _, requests = pair.problems(12)
    steps, _ = collect(pair, requests, temperature=1.0, batch_size=12)
    features = torch.from_numpy(steps.features[..., FEATURES.index("logit_max")])
    logits = torch.zeros(*features.shape, 512)
    logits[..., 1:] = -features[..., None] - math.log(511)
    accepted, drafted = torch.from_numpy(steps.accepted), torch.from_numpy(steps.drafted)
    for start in range(0, len(features) - BATCH, BATCH):
        rows = slice(start, start + BATCH)
        yield logits[rows], torch.ones(BATCH), accepted[rows], drafted[rows]


def compare(reference, ours, batches):
    """Feeds both; features are compared below 6, where theirs, which subtracts the mode from the sum, has digits."""
    from ace_learn.speculation.estimator import log_odds

    slots = torch.randperm(BATCH, generator=torch.Generator().manual_seed(0)).int()  # requests live in slots of theirs
    confidence = torch.ones(BATCH, K)
    seen = {"features": 0.0, "predictions": 0.0, "slope": [], "intercepts": []}
    for logits, temperature, accepted, drafted in batches:
        by_slot = torch.empty(BATCH).index_copy(0, slots.long(), temperature)
        for step in range(K):
            reference.predict(logits[:, step], slots, torch.tensor(step), confidence, by_slot)
        features = torch.stack([log_odds(row, float(t)) for row, t in zip(logits, temperature, strict=True)])
        apart = torch.where(features < 6.0, reference.features[slots] - features, 0.0)
        seen["features"] = max(seen["features"], float(apart.abs().max()))
        seen["predictions"] = max(seen["predictions"], float((confidence - ours.predict(features)).abs().max()))
        reference.step(slots, (accepted + 1).int(), (drafted - accepted).int())
        before = ours.slope
        ours.observe(features, accepted, drafted)
        if ours.slope is not before:
            seen["slope"].append([float(reference.slope), float(ours.slope)])
            seen["intercepts"].append([reference.intercepts.tolist(), ours.intercepts.tolist()])
    return seen


if __name__ == "__main__":
    main()
