"""Labels of a V2 engine whose drafter copies its target; run as a script with the folders of target, draft and head.

A draft is rejected there only where a row is forced. Prints [accepted, rejected] labels of steps as sampled, and as
an estimator is given them.
"""

import json
import sys

from ace_learn.testing.vllm.shims import use_interpreted_v2


def main():
    """Asks for thinking budgets, half of the requests with exits too."""
    use_interpreted_v2()
    from ace_learn.testing.vllm.engine import running_engine
    from ace_learn.testing.vllm.models import tiny_prompts

    target, draft, head = sys.argv[1:]
    sampled, given = count_labels()
    with running_engine(
        target,
        settings={"head": head},
        speculation={"method": "draft_model", "model": draft, "num_speculative_tokens": 4},
        reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
    ) as llm:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=40,
                ignore_eos=True,
                thinking_token_budget=9 + 5 * i,
                extra_args={"ace_enabled": True} if i % 2 else None,
            )
            for i in range(6)
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in tiny_prompts(6)], params, use_tqdm=False)
    records = [output.kv_transfer_params["ace_learn"] for output in outputs if output.kv_transfer_params]
    reasons = [record["reason"] for record in records]
    print(json.dumps({"sampled": sampled, "given": given, "reasons": reasons}))


def count_labels():
    """Gives every speculator an estimator that counts; what is sampled is counted in front of it."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    sampled, given = [0, 0], [0, 0]

    def count(into):
        def step(requests, num_sampled, num_rejected):
            into[0] += int((num_sampled - 1).clamp_min(0).sum())
            into[1] += int(((num_sampled > 0) & (num_rejected > 0)).sum())

        return step

    class Estimator:
        def __init__(self):
            self.step = count(given)

        def predict(self, *values):
            pass

    load, observe = DraftModelSpeculator.load_model, DraftModelSpeculator.observe_verification
    before = count(sampled)

    def load_model(self, target):
        load(self, target)
        self.acceptance_estimator = Estimator()

    def observe_verification(self, *counts):
        before(*counts)
        observe(self, *counts)

    DraftModelSpeculator.load_model, DraftModelSpeculator.observe_verification = load_model, observe_verification
    return sampled, given


if __name__ == "__main__":
    main()
