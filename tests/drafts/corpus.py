"""Traces of a tiny target whose text is peaked, and drafts for it."""

from functools import cache

import torch

from ace_learn.drafts.config import DraftOptimizer, DraftShape, JointSignals, Unrolling
from ace_learn.drafts.data import Trace
from ace_learn.drafts.draft import fresh_eagle3, fresh_mtp
from ace_learn.drafts.module import DraftModule
from ace_learn.drafts.vocabulary import choose_vocabulary, token_counts
from ace_learn.models.cache import SlotCache
from ace_learn.signals import LEARNED
from tests.helpers.targets import tiny_target

PROMPT = 3


@cache
def peaked_target():
    return tiny_target("qwen3", spread=0.3)


@cache
def sampled_traces(count=4, length=24):
    """Traces that the target has sampled, each a little shorter than the one before; every third token has targets."""
    target, generator = peaked_target(), torch.Generator().manual_seed(0)
    traces = []
    for index in range(count):
        tokens = torch.randint(3, target.vocab_size, (1, PROMPT), generator=generator)
        while tokens.shape[1] < length - index:
            probabilities = target_logits(target, tokens)[:, -1].softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
        targets = torch.full((tokens.shape[1], len(LEARNED)), torch.nan)
        labelled = torch.arange(PROMPT, tokens.shape[1], 3)
        way = torch.linspace(0, 1, len(labelled))
        targets[labelled] = torch.stack((way, way, 50 * (1 - way), (way > 0.5).float()), dim=1)
        traces.append(Trace(tokens[0], PROMPT, targets))
    return traces


@torch.inference_mode()
def target_logits(target, tokens):
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return target.forward(tokens, places, target.new_cache(len(tokens)), longest=tokens.shape[1]).logits


def make_draft(kind="eagle3", *, signals=LEARNED, vocab_size=40, seed=0, target=None, **shape):
    target = target or peaked_target()
    torch.manual_seed(seed)
    if kind == "qwen3_next":
        shape = {"style": kind, "experts": 4, "active_experts": 2, "expert_size": 24} | shape
    if kind != "eagle3":
        return fresh_mtp(DraftShape(**shape), target, signals=signals)
    vocabulary = choose_vocabulary(token_counts(sampled_traces(), target.vocab_size), vocab_size)
    return fresh_eagle3(DraftShape(**shape), target, vocabulary, signals=signals)


JOINT = JointSignals()


def make_module(draft, *, steps=3, decay=0.5, signals=JOINT, **options):
    return DraftModule(
        draft,
        peaked_target(),
        unrolling=Unrolling(steps=steps, decay=decay),
        signals=signals,
        optimizer=DraftOptimizer(),
        **options,
    )


def decode_steps(draft, aux, tokens, anchor, steps):
    """What the output projection reads at each of the steps of drafting behind a verified position, one by one."""
    cache, reads = SlotCache(1, 1), []
    hidden, places = draft.fuse(aux[:, : anchor + 1]), torch.arange(anchor + 1)[None]
    inputs = tokens[:, 1 : anchor + 2]
    for step in range(steps):
        out = draft.decode(inputs, hidden, places, cache, longest=anchor + 1 + step)
        reads.append(out.read[:, -1:])
        hidden, places = out.fed_back[:, -1:], torch.tensor([[anchor + 1 + step]])
        inputs = tokens[:, anchor + 2 + step : anchor + 3 + step]
    return reads
