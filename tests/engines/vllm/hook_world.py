"""A made-up target whose hidden states hang on the whole prefix, a runner that schedules it at random, and a slow
sequential reference."""

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from ace_learn.engines.signaller import HeadSignaller
from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.host_rule import HostRule
from ace_learn.engines.vllm.rows import StepRows
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.state import SPAN_SIZE, entropy_of
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows
from ace_learn.features.spec import FeatureSpec
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.signals import SIGNALS
from ace_learn.thinking import BoundaryTables, ThinkMarkers, opens_think

TEXTS = ["a", "\n", "\n\n", ".\n\n", "<t>", "</", "t>", "b", "c", "d", " ", "x\n"]
START, END = (4,), (5, 6)
MARKERS = ThinkMarkers(START, END)
TABLES = BoundaryTables.from_texts(TEXTS)
VOCAB, HIDDEN, DELAY = len(TEXTS), 6, 5
BODY = (0, 0, 7, 8, 9, 7, 1, 2, 3, 5)
WHITE = (*BODY, 1, 1, 10, 10, 11, 11)
SPEC = FeatureSpec(sources=("target_last", "target_aux", "scalars"), hidden_size=HIDDEN, aux_layers=(1,))
OUTPUT_LAYER = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))

POLICY = ExitPolicy(
    predicate="all",
    thresholds={"confidence": 0.45, "remaining": 3.0},
    ewma=0.5,
    smooth_over="tokens",
    patience=1,
    min_thinking_tokens=4,
)


def hidden_of(prefix, salt=0):
    """A state that any slip of a token or a position changes."""
    mixed = salt
    for token in prefix:
        mixed = (mixed * 31 + token + 1) % 1_000_003
    return torch.tensor([math.sin(mixed * (k + 1) * 0.7) for k in range(HIDDEN)])


def drafted_of(ids, position):
    """The drafter's state at a position: it has seen the token behind it."""
    return hidden_of(ids[: position + 2], salt=9)


def drafted_before(prefix):
    """What the last token of a prefix reads of it."""
    position = len(prefix) - 1 - DELAY
    return drafted_of(prefix, position) if position >= 0 else torch.zeros(HIDDEN)


def logits_of(prefix):
    return OUTPUT_LAYER @ hidden_of(prefix)


def token_logits(tokens, hidden):
    return (OUTPUT_LAYER[tokens] * hidden).sum(-1)


def make_head(seed=0, spec=SPEC):
    torch.manual_seed(seed)
    head = SignalHead(HeadConfig(width=8, members=2), spec.size)
    with torch.no_grad():
        head.layers[-1].weight *= 4
    return HeadSignaller(head, spec, torch.device("cpu"))


@dataclass(frozen=True)
class Options:
    exits: bool = True
    shadow: bool = False
    policy: ExitPolicy | None = POLICY


@dataclass
class Live:
    """A request with the tokens that it will have generated, forced or not."""

    request_id: str
    prompt: list[int]
    output: list[int]
    options: Options = field(default_factory=Options)
    at: int = 0
    """Position of its next row 0; what stands before is computed."""

    @property
    def ids(self):
        return self.prompt + self.output

    @property
    def done(self):
        return self.at >= len(self.ids)


def new_live(request_id, draw, options=None, length=30, body=BODY):
    prompt = draw.choices(BODY, k=draw.randint(1, 12))
    output = [4, *draw.choices(body, k=length), 5, 6, 7, 2, 4, 0, 2, 0]
    if draw.random() < 0.4:
        prompt, output = [*prompt, 4], output[1:]
    return Live(request_id, prompt, output, options or Options())


def make_hook(policy=POLICY, signaller=None, spec=SPEC, kind=ExitHook, num_draft_tokens=4, **options):
    return kind(
        markers=MARKERS,
        tables=TABLES,
        policy=policy,
        signaller=make_head() if signaller is None else signaller,
        spec=spec,
        token_logits=token_logits,
        device=torch.device("cpu"),
        num_draft_tokens=num_draft_tokens,
        **options,
    )


def rows_of(parts, **changes):
    """Rows of a step; `parts` are (request id, position of row 0, prefix up to and including each row's token)."""
    prefixes = [prefix for _, _, mine in parts for prefix in mine]
    placeholders = [prefix[-1] < 0 for prefix in prefixes]
    known = [[0] if placeholder else prefix for prefix, placeholder in zip(prefixes, placeholders, strict=True)]
    positions = [first + r for _, first, mine in parts for r in range(len(mine))]
    rows = StepRows(
        request_ids=[request_id for request_id, _, _ in parts],
        counts=np.array([len(mine) for _, _, mine in parts]),
        tokens=torch.tensor([prefix[-1] for prefix in prefixes], dtype=torch.int32),
        positions=torch.tensor(positions),
        hidden=torch.stack([hidden_of(prefix) for prefix in known]),
        logits=torch.stack([logits_of(prefix) for prefix in known]),
        aux=torch.stack([hidden_of(prefix, salt=5) for prefix in known]),
    )
    return rows._replace(**changes)


def window(live, kept, drafts=()):
    """`kept` true rows of a request from its position on, and rejected drafts behind them."""
    ids = [*live.ids[: live.at + kept], *drafts]
    return (live.request_id, live.at, [ids[: p + 1] for p in range(live.at, live.at + kept + len(drafts))])


def reference(live, policy=None, signaller=None):
    """Per output token, by one token per step: (forced token, smoothed signals, tokens thought, paragraphs)."""
    tracker = ExitTracker(
        markers=MARKERS,
        tables=TABLES,
        policy=policy or live.options.policy,
        signaller=make_head() if signaller is None else signaller,
        num_slots=1,
        window=2,
        device=torch.device("cpu"),
    )
    slot, base = torch.tensor([0]), len(live.prompt)
    inside = torch.tensor([opens_think(live.prompt, MARKERS)])
    tracker.admit(slot, torch.tensor([base]), in_think=inside, armed=torch.tensor([True]))
    out = []
    for position in range(base, len(live.ids)):
        prefix = live.ids[: position + 1]
        rows = Rows(
            tokens=torch.tensor([[prefix[-1]]]),
            positions=torch.tensor([[position]]),
            logprobs=logits_of(prefix[:-1]).log_softmax(-1)[prefix[-1]].reshape(1, 1),
            entropy=entropy_of(logits_of(prefix).log_softmax(-1)).reshape(1, 1),
            hidden=Hidden(
                hidden_of(prefix).reshape(1, 1, -1),
                hidden_of(prefix, salt=5).reshape(1, 1, -1),
                drafted_before(prefix).reshape(1, 1, -1),
            ),
        )
        verdict = tracker.observe(slot, rows)
        counts = int(verdict.thought[0, 0]), int(verdict.paragraphs[0, 0])
        out.append((int(verdict.forced[0, 0]), verdict.smoothed[0, 0], *counts))
    return out


class Schedule:
    """Runs requests through a hook with windows, rejections, chunks, preemptions and lag drawn at random."""

    def __init__(self, hook, lives, seed, *, num_draft_tokens=4, at_once=4, lag=1):
        self.hook, self.waiting, self.draw = hook, list(lives), random.Random(seed)
        self.num_draft_tokens, self.at_once, self.lag = num_draft_tokens, at_once, lag
        self.running, self.prefilling, self.in_flight = [], {}, []
        self.forced = {live.request_id: {} for live in lives}
        self.smoothed = {live.request_id: {} for live in lives}
        self.events, self.failures, self.preemptions, self.steps = [], [], 0, 0

    def run(self):
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.at_once:
                live = self.waiting.pop(0)
                self.hook.admit(live.request_id, live.prompt, live.options)
                self.prefilling[live.request_id] = self._chunks(0, len(live.prompt) - 1)
                self.running.append(live)
            self._step()
            for live in [live for live in self.running if live.done]:
                self.running.remove(live)
                self.hook.finish([live.request_id])
        while self.in_flight:
            self._report()
        return self

    def _chunks(self, first, last):
        """Last positions of the chunks in which a prefill up to `last` runs."""
        inner = [p for p in range(first, last) if self.draw.random() < 0.3]
        return [*inner, last]

    def _step(self):
        self.steps += 1
        parts, kept = [], []
        self.draw.shuffle(self.running)
        for live in self.running:
            chunks = self.prefilling[live.request_id]
            if chunks:
                position = chunks.pop(0)
                parts.append((live.request_id, position, [live.ids[: position + 1]]))
                live.at = position + 1
                if not chunks:  # only the last chunk samples a token
                    kept.append((live, position, 1))
                continue
            if self.draw.random() < 0.08:
                self._preempt(live, parts)
                continue
            most = min(self.draw.randint(1, self.num_draft_tokens + 1), len(live.ids) - live.at)
            room = self.num_draft_tokens + 1 - most
            rejected = self.draw.choices((*range(VOCAB), -1), k=self.draw.randint(0, room))
            if -1 in rejected:
                rejected = [*rejected[: rejected.index(-1)], *[-1] * (len(rejected) - rejected.index(-1))]
            parts.append(window(live, most, rejected))
            kept.append((live, live.at, most))
            live.at += most
        if parts:
            self._observe(parts, kept)

    def _preempt(self, live, parts):
        """A step whose tokens are dropped, and then everything is computed again, in chunks."""
        dropped = self.draw.choices(range(VOCAB), k=self.draw.randint(0, self.num_draft_tokens))
        parts.append(window(live, 1, dropped))
        self.prefilling[live.request_id] = self._chunks(0, live.at)
        self.hook.admit(live.request_id, live.prompt, live.options)
        self.preemptions += 1

    def _observe(self, parts, kept):
        forced = self.hook.observe(rows_of(parts))
        starts = np.cumsum([0, *[len(mine) for _, _, mine in parts]])
        place = {request_id: start for (request_id, _, _), start in zip(parts, starts, strict=False)}
        for live, first, count in kept:
            for r in range(count):
                token = -1 if forced is None else int(forced[place[live.request_id] + r])
                self.forced[live.request_id][first + r] = token
                self.smoothed[live.request_id][first + r] = self.state(live.request_id, first + r)
        self.in_flight.append({live.request_id: count for live, _, count in kept})
        if len(self.in_flight) > self.lag:
            self._report()

    def state(self, request_id, position):
        """Smoothed signals that the hook keeps after a position; None where it keeps none."""
        followed = self.hook._requests.get(request_id)
        if followed is None:
            return None
        if isinstance(self.hook._rule, HostRule):
            ended = followed.span.over or not followed.active  # nothing is followed behind the first think block
            return None if ended else torch.tensor(followed.decision.smoothed)
        (state,), held = self.hook._rule.table.states.load(torch.tensor([followed.slot]), torch.tensor([position]))
        return state[0, SPAN_SIZE : SPAN_SIZE + len(SIGNALS)] if bool(held) else None

    def _report(self):
        sizes = self.in_flight.pop(0)
        report = self.hook.report()
        self.events += [event for event in report.exits if event.row < sizes.get(event.request_id, 0)]
        self.failures += report.failures
