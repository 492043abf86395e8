"""Runs vLLM's own acceptance estimator, its Triton kernels interpreted on the CPU, next to ours; prints both as JSON.

A process of its own, since the interpreter must be chosen before triton is imported.
"""

import json
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

    reference = Reference(BATCH, K, torch.device("cpu"))
    reference.REFIT_INTERVAL = INTERVAL
    print(json.dumps(compare(reference, OnlineAcceptanceEstimator(num_positions=K, refit_interval=INTERVAL))))


def compare(reference, ours):
    from ace_learn.speculation.estimator import log_odds

    draw = torch.Generator().manual_seed(0)
    slots = torch.randperm(BATCH, generator=draw).int()  # requests live in slots of their own
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.3] * (BATCH // 4))
    confidence = torch.ones(BATCH, K)
    seen = {"features": 0.0, "predictions": 0.0, "slope": [], "intercepts": []}
    for _ in range(INTERVAL * REFITS):
        by_step = []
        for step in range(K):
            logits = torch.randn(BATCH, VOCAB, generator=draw) * torch.rand(BATCH, 1, generator=draw) * 4
            reference.predict(logits, slots, torch.tensor(step), confidence, temperature)
            each = [log_odds(row, float(t)) for row, t in zip(logits, temperature[slots], strict=True)]
            by_step.append(torch.stack(each))
        features = torch.stack(by_step, dim=1)
        seen["features"] = max(seen["features"], float((reference.features[slots] - features).abs().max()))
        seen["predictions"] = max(seen["predictions"], float((confidence - ours.predict(features)).abs().max()))
        drafted = torch.randint(0, K + 1, (BATCH,), generator=draw)
        accepts = torch.rand(BATCH, K, generator=draw) < torch.sigmoid(0.9 * features + 1.5)
        accepted = torch.minimum(accepts.long().cumprod(1).sum(1), drafted)
        reference.step(slots, (accepted + 1).int(), (drafted - accepted).int())
        before = ours.slope
        ours.observe(features, accepted, drafted)
        if ours.slope is not before:
            seen["slope"].append([float(reference.slope), float(ours.slope)])
            seen["intercepts"].append([reference.intercepts.tolist(), ours.intercepts.tolist()])
    return seen


if __name__ == "__main__":
    main()
