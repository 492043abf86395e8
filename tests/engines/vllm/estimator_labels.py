"""vLLM's own acceptance estimator under Triton's interpreter; run as a script, which prints what it learnt as JSON."""

import json

from ace_learn.testing.vllm.shims import use_interpreted_v2

K, REQUESTS, ROUNDS = 4, 6, 16


def main():
    """Steps two estimators through the same rounds: one sees a forced row as stock, one through our wrapper."""
    use_interpreted_v2()
    import torch
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    from ace_learn.engines.vllm.labels import grading

    torch.manual_seed(0)
    device = torch.device("cpu")
    names = ("stock", "ours", "clean")
    found = {name: OnlineAcceptanceEstimator(REQUESTS, K, device) for name in names}
    first = torch.full((REQUESTS,), K + 1)
    found["ours"].step = grading(found["ours"].step, lambda requests: first)
    slots = torch.arange(REQUESTS, dtype=torch.int32)
    for _ in range(ROUNDS):
        features = torch.randn(REQUESTS, K)
        accepted = torch.randint(0, K + 1, (REQUESTS,))
        first.copy_(torch.where(torch.rand(REQUESTS) < 0.5, torch.randint(0, K + 1, (REQUESTS,)), K + 1))
        for estimator in found.values():
            estimator.features.copy_(features)
            estimator.predictions.copy_(torch.sigmoid(0.5 * features - 0.2))
        counts = (accepted + 1).int(), (K - accepted).int()
        found["stock"].step(slots, *counts)
        found["ours"].step(slots, *counts)
        for request in range(REQUESTS):  # by hand: drafts behind a forced row never were
            drafted = min(K, int(first[request]))
            kept = min(int(accepted[request]), drafted)
            one = slots[request : request + 1]
            found["clean"].step(one, torch.tensor([kept + 1]).int(), torch.tensor([drafted - kept]).int())
    print(json.dumps({name: [e.info.tolist(), e.grad.tolist(), e.counts.tolist()] for name, e in found.items()}))


if __name__ == "__main__":
    main()
