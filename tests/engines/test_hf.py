"""The reference engine against plain greedy decoding, against itself with speculation, and against its own branches."""

from functools import cache

import pytest
import torch

import ace_learn.exit.tracker as tracker_module
from ace_learn.contracts import Contract
from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import Branch, HFEngine
from ace_learn.engines.hidden_drafter import HiddenDrafter
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy
from ace_learn.models.target import Target
from ace_learn.speculation.drafters import NgramDrafter
from ace_learn.tasks import TaskConfig, build_task, render_prompt
from tests.helpers.targets import OPENED_BY_MODEL, WORDS, tiny_model, tiny_target

GREEDY = Sampling(temperature=0.0)
POLICY = ExitPolicy(
    predicate="all", thresholds={"confidence": 0.5}, ewma=0.5, smooth_over="tokens", min_thinking_tokens=6
)


class RandomHead:
    """Signals that swing with the hidden state, so that exits happen at all sorts of boundaries."""

    def __init__(self, hidden_size):
        self.weight = torch.randn(hidden_size, 4, generator=torch.Generator().manual_seed(1))

    def __call__(self, scalars, candidates, hidden):
        return torch.sigmoid(4 * hidden.last @ self.weight / hidden.last.norm(dim=-1, keepdim=True))


def prompts(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    words = [w for w in range(len(WORDS)) if WORDS[w] not in ("<think>", "</think>", "<eos>", "<unk>")]
    think = WORDS.index("<think>")
    return [
        (*[words[i] for i in torch.randint(0, len(words), (int(n),), generator=draw)], think)
        for n in torch.randint(3, 30, (count,), generator=draw)
    ]


def requests(count, contract=None, **options):
    spec = {"max_new_tokens": 90, "max_answer_tokens": 24, **options}
    return [Request(key=i, prompt_ids=ids, contract=contract, **spec) for i, ids in enumerate(prompts(count))]


def reasoner_requests(target, count):
    examples = list(build_task(TaskConfig(name="reasoner")).examples(count, seed=11))
    rendered = [render_prompt(target.tokenizer, e.messages, thinking=True, markers=target.markers) for e in examples]
    return [
        Request(key=i, prompt_ids=tuple(ids), contract=e.contract, max_new_tokens=400, max_answer_tokens=40)
        for i, (ids, e) in enumerate(zip(rendered, examples, strict=True))
    ]


def engine(target, *, exits=True, draft=None, draft_tokens=0, batch_size=8, sampling=GREEDY):
    """An engine that speculates with n-grams, or with the model or the draft module `draft`."""
    if draft is None or isinstance(draft, Target):
        drafter = None if draft is None else ModelDrafter(draft, sampling=sampling, vocab_size=target.vocab_size)
    else:
        drafter = HiddenDrafter(draft, target, sampling=sampling)
    return HFEngine(
        target,
        sampling=sampling,
        policy=POLICY if exits else None,
        signaller=RandomHead(target.identity.hidden_size) if exits else None,
        drafter=(drafter or NgramDrafter()) if draft_tokens else None,
        num_draft_tokens=draft_tokens,
        batch_size=batch_size,
    )


@cache
def undrafted(target, *, exits):
    """Outputs without speculation, which all parity checks share."""
    return engine(target, exits=exits, batch_size=24).generate(reasoner_requests(target, 24))


def parity_failures(target, *, draft_tokens, batch_size, draft=None, count=24, accepts=True):
    """What speaks against speculation being invisible: an empty list is parity on a case that tests something."""
    asked = reasoner_requests(target, count)
    plain, without = undrafted(target, exits=True)[:count], undrafted(target, exits=False)[:count]
    speculated = engine(target, draft=draft, draft_tokens=draft_tokens, batch_size=batch_size).generate(asked)
    steps = sum(output.stats.verify_steps for output in speculated)
    checks = {
        "outputs differ": [o.token_ids for o in plain] == [o.token_ids for o in speculated],
        "exits differ": [o.exit and o.exit.output_index for o in plain]
        == [o.exit and o.exit.output_index for o in speculated],
        "less than half exit": sum(o.exit is not None for o in speculated) >= count / 2,
        "exits change nothing": sum(a.token_ids != b.token_ids for a, b in zip(plain, without, strict=True))
        >= count / 2,
        "nothing is drafted": sum(o.stats.drafted for o in speculated) > 0,
        "nothing is accepted": not accepts or sum(len(o.token_ids) for o in speculated) / steps > 1.05,
    }
    return [name for name, passed in checks.items() if not passed]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_speculation_does_not_change_greedy_output(reasoner_target, draft_tokens, batch_size):
    assert parity_failures(reasoner_target, draft_tokens=draft_tokens, batch_size=batch_size) == []


def test_a_state_machine_that_is_off_by_one_row_fails_the_same_check(reasoner_target, monkeypatch):
    load = tracker_module.ExitTracker._load

    def off_by_one(self, slots, positions):
        place = (positions - 1) % self.window
        known = self.held_position[slots, place] == positions - 1
        return torch.where(known[:, None], self.ring[slots, place], load(self, slots, positions))

    monkeypatch.setattr(tracker_module.ExitTracker, "_load", off_by_one)
    assert "outputs differ" in parity_failures(reasoner_target, draft_tokens=4, batch_size=8)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_next"])
def test_greedy_output_equals_generate_of_transformers(architecture):
    target, stock = tiny_target(architecture, spread=0.5), tiny_model(architecture, spread=0.5)
    asked = requests(8, max_new_tokens=40, max_answer_tokens=None)
    ours = engine(target, exits=False).generate(asked)
    for request, output in zip(asked, ours, strict=True):
        ids = torch.tensor([request.prompt_ids])
        theirs = stock.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        expected = tuple(theirs[0, ids.shape[1] :].tolist())
        length = len(expected)
        if expected[-1] in target.stop_ids and output.think_end == length - 1:
            length -= 1  # a stop token in the thinking became its end
        assert output.token_ids[:length] == expected[:length]


def test_sampled_exits_are_a_prefix_of_the_full_run():
    """Without speculation an exit at temperature 1 leaves everything before it as it was, in any batch."""
    target = tiny_target("llama")
    sampling = Sampling(temperature=1.0, seed=5)
    asked = requests(64)
    full = engine(target, exits=False, sampling=sampling, batch_size=64).generate(asked)
    early = engine(target, sampling=sampling, batch_size=24).generate(asked)
    exited = [(f, e) for f, e in zip(full, early, strict=True) if e.exit is not None]
    assert len(exited) >= 10
    for f, e in exited:
        cut = e.exit.output_index
        assert e.token_ids[:cut] == f.token_ids[:cut]
        assert e.token_ids[cut] == target.markers.end[0]
        assert e.think_end == cut == e.exit.tokens_thought


def repetitive_prompt(target):
    """a b a b a b: the pair whose repetition the model finds likeliest without being sure of it."""
    words = torch.arange(20, 56)
    a, b = (grid.flatten() for grid in torch.meshgrid(words, words, indexing="ij"))
    tokens = torch.stack((a, b, a, b, a, b, a), dim=1)
    positions = torch.arange(7).expand_as(tokens)
    logits = target.forward(tokens, positions, target.new_cache(len(tokens)), longest=7).logits
    law = logits.softmax(-1)
    likely = law[:, 5].gather(1, a[:, None]) * law[:, 6].gather(1, b[:, None])
    best = int((likely * (likely < 0.5)).argmax())
    return tuple(tokens[best, :6].tolist())


@pytest.mark.parametrize("with_model", [False, True])
def test_sampled_speculation_keeps_the_law(with_model):
    """Tokens that are accepted drafts, or drawn after a rejection, have the target's law (chi-square)."""
    from scipy.stats import chi2_contingency

    target = tiny_target("qwen2", spread=0.5)
    draft = tiny_target("llama", spread=0.3) if with_model else None
    count, prompt = 3000, repetitive_prompt(target)
    asked = [Request(key=i, prompt_ids=prompt, max_new_tokens=4) for i in range(count)]
    laws, accepted = [], 0
    for draft_tokens in (0, 2):
        outputs = engine(
            target,
            exits=False,
            draft=draft,
            draft_tokens=draft_tokens,
            batch_size=1000,
            sampling=Sampling(seed=draft_tokens),
        ).generate(asked)
        accepted += sum(o.stats.accepted for o in outputs)
        pairs = torch.tensor([[*o.token_ids, 0, 0, 0][1] * len(WORDS) + [*o.token_ids, 0, 0, 0][2] for o in outputs])
        laws.append(torch.bincount(pairs, minlength=len(WORDS) ** 2))
    assert accepted > 200
    table = torch.stack(laws)
    common = table[:, table.sum(0) >= 20]
    rest = table.sum(1, keepdim=True) - common.sum(1, keepdim=True)
    assert chi2_contingency(torch.cat((common, rest), dim=1).numpy()).pvalue > 1e-3


def test_contract_commit_ends_the_request_without_surplus():
    target = tiny_target("llama")
    contract = Contract.from_spec({"kind": "boxed"})
    outputs = engine(target, exits=False, sampling=Sampling(seed=1)).generate(
        requests(24, contract, max_new_tokens=400)
    )
    committed = [o for o in outputs if o.finish_reason == "contract"]
    assert len(committed) >= 12
    for output in committed:
        assert WORDS[output.token_ids[-1]].startswith("\\boxed")
        assert output.answer in "789"
        assert output.answer_text.endswith(f"{{{output.answer}}}")
        assert len(output.logprobs) == len(output.token_ids)


def test_stop_token_in_the_thinking_becomes_the_think_end():
    target = tiny_target("llama")
    end, stop = target.markers.end[0], WORDS.index("<eos>")
    outputs = engine(target, exits=False, sampling=Sampling(seed=2)).generate(requests(48, max_new_tokens=300))
    ended = [o for o in outputs if o.think_end is not None]
    assert len(ended) > 40
    assert all(stop not in o.token_ids[: o.think_end] for o in ended)
    assert all(o.token_ids[o.think_end] == end for o in ended)


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_stop_token_in_the_thinking_may_end_the_request(draft_tokens):
    target = tiny_target("llama")
    asked = requests(48, max_new_tokens=300, eos_in_think="stop")
    outputs = engine(target, exits=False, draft_tokens=draft_tokens, sampling=Sampling(seed=2)).generate(asked)
    cut = [o for o in outputs if o.think_end is None and o.finish_reason == "stop"]
    assert len(cut) > 10
    assert all(o.token_ids[-1] == WORDS.index("<eos>") and o.answer is None for o in cut)
    assert any(o.think_end is not None for o in outputs)


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_the_models_context_ends_the_request(draft_tokens):
    target = tiny_target("llama", spread=0.5)
    fill = prompts(1)[0][:2]
    asked = [Request(key=i, prompt_ids=(*fill * 250, *ids[:8]), min_tokens=90) for i, ids in enumerate(prompts(6))]
    draft = target if draft_tokens else None
    outputs = engine(target, exits=False, draft=draft, draft_tokens=draft_tokens, batch_size=4).generate(asked)
    assert {o.finish_reason for o in outputs} == {"context"}
    assert [len(r.prompt_ids) + len(o.token_ids) for r, o in zip(asked, outputs, strict=True)] == [512] * 6
    assert draft_tokens == 0 or sum(o.stats.accepted for o in outputs) > 0


def test_stop_string_cuts_the_text_and_keeps_the_token_that_completes_it():
    target = tiny_target("llama")
    asked = requests(32, max_new_tokens=300, max_answer_tokens=200, stop=(" sum is",))
    asked += requests(32, max_new_tokens=300, max_answer_tokens=200, stop=(" sum",))[16:]
    outputs = engine(target, exits=False, sampling=Sampling(seed=3)).generate(asked)
    stopped = [o for o in outputs if o.finish_reason == "stop" and o.token_ids[-1] != WORDS.index("<eos>")]
    assert stopped
    for output in stopped:
        assert " sum" not in output.answer_text
        assert WORDS[output.token_ids[-1]] in (" sum", " is")


def test_branches_equal_live_exits_and_cost_their_own_tokens_only():
    """A branch at a boundary is what a live run that exits there emits, token for token (same noise by position)."""
    target = tiny_target("qwen3")
    sampling = Sampling(temperature=1.0, seed=4)
    contract = Contract.from_spec({"kind": "boxed"})
    asked = requests(48, contract, max_new_tokens=300)
    live = engine(target, sampling=sampling, batch_size=20).generate(asked)
    prober = engine(target, exits=False, sampling=sampling, batch_size=48)
    rollouts = prober.rollout(asked, "boundaries")
    cost = prober.forward_tokens
    exited = [i for i, output in enumerate(live) if output.exit is not None]
    assert len(exited) >= 6
    branches = prober.branch(rollouts, [Branch(i, live[i].exit.output_index) for i in exited])
    for i, branch in zip(exited, branches, strict=True):
        assert branch.token_ids == live[i].token_ids
        assert branch.answer == live[i].answer
    answers = sum(len(b.token_ids) - b.think_end for b in branches)
    assert prober.forward_tokens - cost <= answers  # no prefix was run again


def test_thinking_that_was_ended_once_is_left_alone_when_it_reopens():
    target = tiny_target("llama", template=OPENED_BY_MODEL)
    always = HFEngine(
        target,
        sampling=Sampling(seed=6),
        policy=ExitPolicy(predicate="any", thresholds={"confidence": 0.0}),
        signaller=RandomHead(target.identity.hidden_size),
        batch_size=32,
    )
    passed = {}

    def listen(live, tokens, boundaries):
        after = live.exit is not None and live.length - len(tokens) > live.exit.output_index
        passed[live.request.key] = passed.get(live.request.key, 0) + (after and len(boundaries))

    outputs = always.generate(requests(32, max_new_tokens=300, max_answer_tokens=250), listener=listen)
    assert any(passed[o.key] for o in outputs if o.exit is not None)  # boundaries in reopened blocks, not exited


def test_no_think_requests_answer_at_once():
    target = tiny_target("llama")
    asked = [Request(key=0, prompt_ids=(5, 3, 4), thinking=False, max_new_tokens=12)]
    output = engine(target).generate(asked)[0]
    assert output.think_start is None
    assert output.think_tokens == 0
    assert output.exit is None


def test_a_model_that_does_not_think_still_meets_its_contract():
    """Text before any think start is answer; the contract ends the request there."""
    target = tiny_target("llama", template=OPENED_BY_MODEL)
    contract = Contract.from_spec({"kind": "boxed"})
    asked = [Request(key=i, prompt_ids=(2, 9, 9), contract=contract, max_new_tokens=200) for i in range(64)]
    outputs = engine(target, exits=False, sampling=Sampling(seed=8)).generate(asked)
    unthought = [o for o in outputs if o.think_start is None and o.finish_reason == "contract"]
    assert unthought
    assert all(o.answer in "789" and o.answer_text.endswith("}") for o in unthought)
    later = [o for o in outputs if o.think_start and o.finish_reason == "contract"]
    assert any(o.think_start > 1 and "<think>" not in o.answer_text for o in later)


def test_bad_requests_and_engines_are_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="empty prompt"):
        engine(target).generate([Request(key=0, prompt_ids=())])
    with pytest.raises(ValueError, match=r"request 0 has a prompt of 512 tokens.* context of 512; shorten the prompt"):
        engine(target).generate([Request(key=0, prompt_ids=(1,) * 512)])
    with pytest.raises(ValueError, match="num_draft_tokens"):
        HFEngine(target, drafter=NgramDrafter())
    with pytest.raises(ValueError, match="batch_size"):
        HFEngine(target, batch_size=0)
    with pytest.raises(ValueError, match="empty stop string"):
        engine(target).generate([Request(key=0, prompt_ids=(1,), stop=("",))])
