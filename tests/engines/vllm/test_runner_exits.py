from types import SimpleNamespace

import pytest
import torch

from ace_learn.exit import ExitPolicy
from ace_learn.thinking import ThinkMarkers

pytestmark = pytest.mark.vllm  # the runners import vLLM's layers

VOCABULARY = 8


class Hook:
    """Forces token 7 behind every row with input token 3."""

    reads_aux, off = False, False
    thinking = open = None

    def __init__(self):
        self.calls = []

    def admit(self, request_id, prompt_ids, options):
        self.calls.append(("admit", request_id, tuple(prompt_ids), options.exits))

    def finish(self, request_ids):
        self.calls.append(("finish", *sorted(request_ids)))

    def observe(self, rows):
        self.thinking = self.open = rows.tokens > 0
        return torch.where(rows.tokens == 3, 7, -1)

    def abandon(self, request_ids, error):
        self.calls.append(("abandon", *request_ids, str(error)))


@pytest.fixture
def exits():
    from ace_learn.engines.vllm.runner import RunnerExits

    class Exits(RunnerExits):
        def attach(self, runner):
            pass

        def before_sampling(self, grammar):
            pass

    return made(Exits)


def made(kind):
    from ace_learn.engines.vllm.settings import Settings

    markers = ThinkMarkers((5,), (7,))
    served = SimpleNamespace(
        head=SimpleNamespace(identity=SimpleNamespace(markers=markers)),
        policy=ExitPolicy.specexit(),
        stop_ids=(1,),
    )
    layer = SimpleNamespace(weight=torch.zeros(VOCABULARY, 4))
    return kind(Hook(), served, Settings(head="head"), layer, reports=True)


def request(request_id, extra_args, *, prompt=(5, 6), ignore_eos=False):
    params = SimpleNamespace(extra_args=extra_args, ignore_eos=ignore_eos)
    return SimpleNamespace(req_id=request_id, sampling_params=params, prompt_token_ids=prompt)


def step(*new, finished=()):
    return SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished))


def rows(ids, tokens):
    from ace_learn.engines.vllm.rows import StepRows

    size = len(tokens)
    return StepRows(
        request_ids=ids,
        counts=torch.ones(len(ids), dtype=torch.long).numpy() * (size // len(ids)),
        tokens=torch.tensor(tokens),
        positions=torch.arange(size),
        hidden=torch.zeros(size, 4),
        logits=torch.zeros(size, VOCABULARY),
    )


ON = {"ace_enabled": True}


def test_every_request_is_told_to_the_hook_and_followed_only_where_it_asks(exits):
    exits.admit(step(request("a", ON), request("b", None), request("c", {"ace_enabled": 3})))
    assert exits.hook.calls[1:] == [
        ("admit", "a", (5, 6), True),
        ("admit", "b", (5, 6), False),
        ("admit", "c", (5, 6), False),  # the API process refuses it; here it must not end the engine
    ]
    assert exits.follows(["b", "a"])
    assert not exits.follows(["b", "c"])
    exits.admit(step(request("a", ON), finished=["a"]))  # aborted, and sent again under its name
    assert exits.hook.calls[4:] == [("finish", "a"), ("admit", "a", (5, 6), True)]
    assert exits.follows(["a"])


def test_prompts_without_token_ids_have_no_exits(exits):
    exits.admit(step(request("a", ON, prompt=None)))
    assert exits.hook.calls[1:] == [("admit", "a", (), False)]


def test_rows_that_cannot_be_read_give_up_the_step_and_not_the_engine(exits):
    def read():
        raise AttributeError("no execute_model_state")

    exits.observe(["a", "b"], read)
    assert exits.hook.calls == [("abandon", "a", "b", "no execute_model_state")]
    logits = torch.randn(2, VOCABULARY)
    assert exits.shape(logits.clone(), slice(None), torch.ones(2)).equal(logits)
    assert exits.done()
    assert not exits.done()


def test_forced_tokens_and_stop_tokens_until_the_step_is_done(exits):
    exits.admit(step(request("a", ON), request("b", ON, ignore_eos=True)))
    exits.observe(["a", "b"], lambda: rows(["a", "b"], [2, 3, 2, 2]))
    logits = torch.randn(4, VOCABULARY)
    shaped = exits.shape(logits.clone(), slice(None), torch.ones(4))
    assert shaped[1].argmax() == 7
    assert shaped.softmax(-1)[1, 7] == 1
    assert shaped[0, 1] == -torch.inf  # the stop token of a; b is never ended by one
    assert shaped[2:].equal(logits[2:])
    part = exits.shape(logits[2:].clone(), slice(2, 4), torch.ones(2))
    assert part.equal(shaped[2:])
    assert exits.done()
    assert exits.shape(logits.clone(), slice(None), torch.ones(4)).equal(logits)


def test_on_the_second_runner_stop_tokens_end_the_thinking_where_nothing_is_forced():
    from ace_learn.engines.vllm.runner_v2 import V2Exits

    exits, slots = made(V2Exits), torch.tensor([0, 1])
    exits.runner = SimpleNamespace(
        sampler=SimpleNamespace(sampling_states=SimpleNamespace(temperature=SimpleNamespace(gpu=torch.ones(2))))
    )
    exits._batch = SimpleNamespace(expanded_idx_mapping=slots)
    logits = torch.randn(2, VOCABULARY)
    assert exits.apply(logits.clone(), SimpleNamespace(expanded_idx_mapping=slots)).equal(logits)
    exits.open = torch.tensor([True, False])  # as where rows wait: nothing is forced, and the thinking is open
    shaped = exits.apply(logits.clone(), SimpleNamespace(expanded_idx_mapping=slots))
    assert shaped[0, 1] == -torch.inf
    assert shaped[1].equal(logits[1])
