"""Sampled decoding with exits: the law of (end of thinking, answer) is the same with drafts and without.

The target knows ten words and thinks for a few tokens, so that outcomes are few, and a chi-square test of two samples
sees whether drafts change how often each one comes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, chi2_contingency, ncx2

from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.json_type import JSON
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.testing.vllm.cells import Cell, CellRequest, CellResult, run_cell, run_interpreted
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import END_THINK, LAW_WORDS, THINK, USER, write_law_models

Outcome: TypeAlias = tuple[int, ...]
"""Tokens thought (-1: to the cap), then the first tokens of the answer."""
_PROMPT = (USER, LAW_WORDS.index("a"), THINK)
_MAX_TOKENS = 14
_ANSWER_TOKENS = {"V1": 2, "V2": 1}
"""Tokens of the answer that tell outcomes apart; fewer where there are few samples."""
_SHARPNESS = {"V1": 1.5, "V2": 2.5}
"""V2 has few samples and greedy drafts, so a law with few common outcomes."""
_LEAST_OUTCOMES = 8
_LEAST_EXPECTED = 5.0
"""Rarer outcomes are counted together."""
_HEAD_REQUESTS = 256
_POWER = 0.9


@dataclass(frozen=True, kw_only=True)
class LawBenchmark:
    """How much is sampled."""

    runner: Literal["both", "v1", "v2"] = "both"
    """`v1` (with the repair of vLLM's CPU build), `v2` (interpreted), or `both`."""
    v1_tokens: int = 200_000
    """Tokens sampled on the first runner, with drafts and without alike."""
    v2_tokens: int = 5_000
    """The same on Model Runner V2, whose kernels are interpreted."""
    draft_tokens: int = 4
    """Drafted tokens per step, K."""
    significance: float = 1e-4
    """The laws count as different where chance alone would make them look so in fewer cases than this."""
    seed: int = 0
    """Of the samples: 2 * seed without drafts, 2 * seed + 1 with them."""
    late: bool = False
    """Plant a fault, which must make the command fail: with drafts, exits are forced one row late."""

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if min(self.v1_tokens, self.v2_tokens) < 1000 or self.draft_tokens < 1 or not 0 < self.significance < 1:
            raise ValueError(
                "need v1_tokens and v2_tokens >= 1000, draft_tokens >= 1 and 0 < significance < 1, not "
                f"{self.v1_tokens}, {self.v2_tokens}, {self.draft_tokens} and {self.significance}"
            )
        if self.seed < 0:
            raise ValueError(f"the seed must not be negative; got {self.seed}")


class LawResult(NamedTuple):
    """Two samples of outcomes."""

    runner: str
    tokens: tuple[int, int]
    """Sampled without drafts and with them."""
    exits: tuple[int, int]
    requests: int
    """In each sample."""
    inside: int
    """Exits inside an accepted window."""
    tokens_per_step: float
    outcomes: int
    """After rare ones were put together."""
    statistic: float
    p_value: float
    distance: float
    """Total variation between the samples; chance alone gives some."""


def detectable(requests: int, outcomes: int, significance: float) -> float:
    """The total variation between two laws from which on they are told apart in nine samples of ten.

    With n requests of each law, p and q, the statistic is about noncentral chi-square, of noncentrality
    n sum (p - q)^2 / (p + q). Cauchy-Schwarz bounds that from below by 2 n TV^2: laws that differ in few outcomes are
    told apart earlier.

    Args:
        requests: In each sample, n.
        outcomes: After rare ones were put together; with a single one, nothing is told apart.
        significance: Level of the test.
    """
    freedom = outcomes - 1
    if not freedom:
        return math.inf
    critical = chi2.isf(significance, freedom)
    needed = brentq(lambda shift: ncx2.sf(critical, freedom, shift) - _POWER, 1e-6, 10 * critical + 100)
    return float(np.sqrt(needed / (2 * requests)))


def compare_laws(config: LawBenchmark) -> None:
    """Samples, tests, and prints.

    Raises:
        SystemExit: With status 1, where the laws differ, or where there was nothing to see.
    """
    runners = ("V1", "V2") if config.runner == "both" else (config.runner.upper(),)
    with TemporaryDirectory(prefix="ace-learn-law-") as folder:
        results = sample_laws(config, Path(folder), runners)
    failed = False
    for result in results:
        print(line(result, config.significance))
        seen = min(result.exits) > 0 and result.inside > 0 and result.tokens_per_step > 1
        seen &= result.outcomes >= _LEAST_OUTCOMES
        failed |= result.p_value < config.significance or not seen
        if not seen:
            print(f"failed: {result.runner} shows too little: no exits, none inside a window, or too few outcomes")
        if result.p_value < config.significance:
            print(f"failed: on {result.runner} the law with drafts is another one")
    if failed:
        sys.exit(1)


def line(result: LawResult, significance: float) -> str:
    """A result in words, and what the test can tell apart at a level."""
    seen = detectable(result.requests, result.outcomes, significance)
    return (
        f"{result.runner}: {result.requests:,} requests each, {result.tokens[0]:,} tokens without drafts "
        f"({result.exits[0]:,} exits), {result.tokens[1]:,} with ({result.exits[1]:,} exits, {result.inside:,} inside "
        f"an accepted window, {result.tokens_per_step:.2f} tokens per verify step): chi-square {result.statistic:.1f} "
        f"over {result.outcomes} outcomes, p = {result.p_value:.3g}; total variation {result.distance:.3f}, and laws "
        f"that are {seen:.3f} apart fall below p = {significance:g} in {_POWER:.0%} of such samples"
    )


def sample_laws(config: LawBenchmark, folder: Path, runners: Sequence[str]) -> list[LawResult]:
    """Samples on each runner; models are written into a folder."""
    return [_sample(config, folder / runner, runner) for runner in runners]


def _sample(config: LawBenchmark, folder: Path, runner: str) -> LawResult:
    models = write_law_models(folder, sharpness=_SHARPNESS[runner])
    target = load_target(TargetConfig(model=str(models.target), dtype="float32", device="cpu"))
    asked = [
        Request(key=i, prompt_ids=_PROMPT, max_new_tokens=_MAX_TOKENS, min_tokens=_MAX_TOKENS)
        for i in range(_HEAD_REQUESTS)
    ]
    head = folder / "head"
    write_test_head(head, target, asked, sampling=Sampling(), min_thinking_tokens=1, ewma=0.7, share=0.75)
    draft: dict[str, JSON] = {
        "method": "draft_model",
        "model": str(models.noisy if runner == "V1" else models.breaking),
        "num_speculative_tokens": config.draft_tokens,
        # Triton's interpreter cannot run the kernel that samples drafts. Greedy drafts must not change the law either,
        # but they seldom foresee a sampled paragraph end, unless the drafter says little else.
        "draft_sample_method": "probabilistic" if runner == "V1" else "greedy",
    }
    count = math.ceil((config.v1_tokens if runner == "V1" else config.v2_tokens) / _MAX_TOKENS)
    cell = _cell(models.target, head, count)
    # V2 draws by seed and position: with one seed for both, the samples would not be independent.
    seeds: list[dict[str, JSON]] = [cell.options | {"seed": 2 * config.seed + arm} for arm in range(2)]
    cells = [
        replace(cell, options=seeds[0]),
        replace(cell, options=seeds[1], speculation=draft, late=config.late),
    ]
    none, drafted = [run_cell(cell) for cell in cells] if runner == "V1" else run_interpreted(cells)
    return compare_samples(runner, none, drafted)


def _cell(model: Path, head: Path, count: int) -> Cell:
    request = CellRequest(prompt_ids=_PROMPT, max_tokens=_MAX_TOKENS, extra_args={"ace_enabled": True}, temperature=1.0)
    return Cell(
        name="law",
        model=str(model),
        settings={"head": str(head)},
        speculation=None,
        requests=(request,) * count,
        options={"max_num_seqs": 128, "max_model_len": 64},
    )


def outcome(ids: Sequence[int], answer_tokens: int = 2) -> Outcome:
    """What a request came to."""
    if END_THINK not in ids:
        return (-1,)
    end = list(ids).index(END_THINK)
    return (end, *ids[end + 1 : end + 1 + answer_tokens])


def compare_samples(runner: str, none: CellResult, drafted: CellResult) -> LawResult:
    """Tests whether two samples come from one law."""
    width = _ANSWER_TOKENS[runner]
    counts = [Counter(outcome(ids, width) for ids in result.token_ids) for result in (none, drafted)]
    table = _pooled(np.array([[count[key] for key in sorted(counts[0] | counts[1])] for count in counts]))
    test = chi2_contingency(table, correction=False)
    shares = table / table.sum(1, keepdims=True)
    return LawResult(
        runner=runner,
        tokens=(sum(map(len, none.token_ids)), sum(map(len, drafted.token_ids))),
        exits=(none.watched.exits, drafted.watched.exits),
        requests=len(none.token_ids),
        inside=drafted.watched.inside,
        tokens_per_step=drafted.watched.tokens_per_step,
        outcomes=table.shape[1],
        statistic=float(test.statistic),
        p_value=float(test.pvalue),
        distance=float(np.abs(shares[0] - shares[1]).sum() / 2),
    )


def _pooled(table: np.ndarray) -> np.ndarray:
    """Puts outcomes together that are too rare for the chi-square law to hold."""
    common = table.sum(0) >= 2 * _LEAST_EXPECTED
    rare = table[:, ~common].sum(1, keepdims=True)
    return np.concatenate((table[:, common], rare), axis=1) if rare.sum() else table[:, common]
