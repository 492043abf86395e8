"""The unrolled objective against drafting one token after the other, with the target run on every prefix."""

import pytest
import torch

from ace_learn.drafts.data import collate
from ace_learn.drafts.rows import shifted, signal_targets, trained_rows
from tests.drafts.corpus import (
    PROMPT,
    decode_steps,
    make_draft,
    make_module,
    peaked_target,
    sampled_traces,
    target_logits,
)

STEPS = 3


def test_rows_by_hand():
    rows = trained_rows(torch.tensor([6, 4]), torch.tensor([2, 3]), width=6, step=0)
    assert rows.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]
    rows = trained_rows(torch.tensor([6, 5]), torch.tensor([2, 1]), width=6, step=1)
    assert rows.int().tolist() == [[0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_shifts_by_hand():
    values = torch.tensor([[10, 11, 12]])
    assert shifted(values, 0).tolist() == [[10, 11, 12]]
    assert shifted(values, 2).tolist() == [[12, 12, 12]]
    targets = torch.arange(3.0).view(1, 3, 1).expand(1, 3, 4)
    assert signal_targets(targets, 1)[0, :, 0].nan_to_num(-1).tolist() == [1, 2, -1]
    assert signal_targets(targets, 3)[0, :, 0].nan_to_num(-1).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "qwen3_next"])
@torch.no_grad()
def test_the_objective_is_that_of_drafting_token_by_token(kind):
    target, draft, traces = peaked_target(), make_draft(kind).eval(), sampled_traces()
    vocabulary, taps = draft.vocabulary, draft.taps(target.identity.num_layers)
    loss, accepted = torch.zeros(STEPS), torch.zeros(STEPS)
    survival, rows = torch.zeros(STEPS), torch.zeros(STEPS)
    for trace in traces:
        tokens = trace.tokens[None]
        with torch.inference_mode():
            places = torch.arange(len(trace.tokens))[None]
            outputs = target.forward(tokens, places, target.new_cache(1), longest=len(trace.tokens), aux_layers=taps)
        for anchor in range(PROMPT - 1, len(trace.tokens) - 2):
            steps = min(STEPS, len(trace.tokens) - anchor - 2)
            alive = 1.0
            for step, read in enumerate(decode_steps(draft, outputs.aux, tokens, anchor, steps)):
                law = target_logits(target, tokens[:, : anchor + step + 2])[0, -1].softmax(-1)[vocabulary]
                said = draft.logits(read)[0, -1].softmax(-1)
                given = law / law.sum()
                loss[step] += (law * (given.log() - said.log())).sum()
                acceptance = torch.minimum(law, said).sum()
                alive = alive * acceptance
                accepted[step] += acceptance
                survival[step] += alive
                rows[step] += 1
    sums = make_module(draft, steps=STEPS).outcome(collate(traces)).tokens
    torch.testing.assert_close(sums.rows, rows)
    torch.testing.assert_close(sums.loss, loss, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sums.acceptance, accepted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sums.survival, survival, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_signal_rows_read_the_first_step_and_learn_the_newest_token():
    draft, traces = make_draft().eval(), sampled_traces()
    module = make_module(draft)
    batch = collate(traces)
    raw, targets = module.signal_rows(module.outcome(batch).shared[0], batch)
    reads, wanted = [], []
    for index, trace in enumerate(traces):
        for token in (~trace.targets.isnan().all(-1)).nonzero()[:, 0].tolist():
            reads.append(module.outcome(batch).shared[0, index, token - 1])  # the row that has just read the token
            wanted.append(trace.targets[token])
    torch.testing.assert_close(targets, torch.stack(wanted), equal_nan=True)
    torch.testing.assert_close(raw, torch.stack(reads) @ draft.ace_head.weight.T)
