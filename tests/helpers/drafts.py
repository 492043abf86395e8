"""Draft modules for tests: random ones, and ones that have seen a little of their target's text."""

from functools import cache

import torch

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.hidden_drafter import HiddenDrafter
from ace_learn.engines.sampling import Sampling
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.eagle3 import Eagle3Config
from ace_learn.models.eagle3_files import new_eagle3
from ace_learn.models.mtp import MimoConfig
from ace_learn.models.mtp_files import new_mtp
from ace_learn.models.qwen3_next import ExpertsConfig, Qwen3NextMtpConfig, partly_rotated
from ace_learn.models.target import OUTPUT
from ace_learn.speculation.drafters import DraftStates

KINDS = ("eagle3", "mtp", "qwen3_next")
"""EAGLE-3, and the blocks that an MTP draft may have."""

EXPERTS = ExpertsConfig(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
)


def random_draft(target, kind, **changes):
    """A draft with fresh weights; an EAGLE-3 one proposes all but every seventh token."""
    torch.manual_seed(0)
    size = target.identity.hidden_size
    block = BlockConfig(
        hidden_size=size, intermediate_size=2 * size, num_attention_heads=4, num_key_value_heads=2, head_dim=size // 4
    )
    if kind == "mtp":
        return new_mtp(target, MimoConfig(block=block, vocab_size=target.vocab_size, **changes)).eval()
    if kind == "qwen3_next":
        settings = {"vocab_size": target.vocab_size, "experts": EXPERTS} | changes
        return new_mtp(
            target, Qwen3NextMtpConfig(block=partly_rotated(block, block.rope_parameters), **settings)
        ).eval()
    vocabulary = torch.tensor([token for token in range(target.vocab_size) if token % 7 != 6])
    config = Eagle3Config(
        block=block, vocab_size=target.vocab_size, draft_vocab_size=len(vocabulary), target_hidden_size=size,
        aux_layers=(1, 2, 3), **changes,
    )  # fmt: skip
    return new_eagle3(target, config, vocabulary).eval()


@cache
def trained_draft(target, kind, requests, steps=40):
    """A draft that has learned from the target's greedy answers to some requests."""
    draft = random_draft(target, kind).train()
    outputs = HFEngine(target, sampling=Sampling(temperature=0.0)).generate(list(requests))
    sequences = [[*r.prompt_ids, *o.token_ids][:110] for r, o in zip(requests, outputs, strict=True)]
    width = max(map(len, sequences))
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])
    lengths = torch.tensor([len(ids) for ids in sequences])
    places = torch.arange(width).expand_as(tokens)
    taps = draft.taps(target.identity.num_layers)
    seen = target.forward(tokens, places, target.new_cache(len(tokens)), longest=width, aux_layers=(*taps, OUTPUT))
    aux, logits = seen.aux[..., : -target.identity.hidden_size].clone(), seen.logits.clone()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.arange(8 * step, 8 * step + 8) % len(tokens)
        loss = torch.zeros(())
        for j, out in enumerate(draft.unroll(tokens[rows], draft.fuse(aux[rows]), 2)):
            counts = places[rows] + j + 2 < lengths[rows, None]
            wanted = logits[rows].argmax(-1).roll(-1 - j, dims=1)
            said = draft.full_logits(out.read).clamp_min(-30.0)
            loss = loss + torch.nn.functional.cross_entropy(said[counts], wanted[counts])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


def drafter_of(draft, target, *, sampling, draft_tokens=0):
    """A drafter; with `draft_tokens` its states are read as late as so many drafts need."""
    states = None
    if draft_tokens:
        states = DraftStates(size=draft.config.block.hidden_size, delay=draft_tokens + 1, drafter="test")
    return HiddenDrafter(draft, target, sampling=sampling, states=states)
