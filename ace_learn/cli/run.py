"""`python -m ace_learn.run RECIPE.yaml`: decode with learned exits, a task's problems or one prompt shown live."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ace_learn.artifacts import atomic_file
from ace_learn.cli.common import run_command
from ace_learn.contracts import Contract
from ace_learn.engines.requests import EosInThink
from ace_learn.engines.sampling import Sampling
from ace_learn.models.target import TargetConfig
from ace_learn.speculation.adaptive import AdaptiveConfig
from ace_learn.speculation.drafters import DrafterConfig
from ace_learn.speculation.rules import AcceptanceConfig
from ace_learn.tasks import TaskConfig, build_task
from ace_learn.tasks.json_object import JsonObject

if TYPE_CHECKING:
    from ace_learn.engines.batch import BoundarySignals
    from ace_learn.engines.hf import HFEngine
    from ace_learn.engines.live import LiveRequest
    from ace_learn.engines.requests import Output, Request
    from ace_learn.models.target import Target
    from ace_learn.tasks.base import Example, Message


_MOST_PROBLEMS = 100_000
"""An endless task would draw them all before the first is decoded."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A recipe of `python -m ace_learn.run`."""

    target: TargetConfig
    """The model that thinks."""
    head: Path | None = None
    """Head folder with a policy (from calibrate); none: full thinking, contract exits only."""
    prompt: str | None = None
    """One prompt, shown live: thinking, signals at each paragraph, the exit, the answer."""
    contract: JsonObject | None = None
    """The prompt's output contract, such as {kind: integer}."""
    task: TaskConfig = TaskConfig()
    """Where the problems come from, without a prompt."""
    problems: int = 32
    """How many of the task's problems to run."""
    sampling: Sampling = Sampling()
    """How tokens are drawn; a certificate holds for its own sampling alone."""
    drafter: DrafterConfig = DrafterConfig()
    """What drafts tokens for the target to verify."""
    acceptance: AcceptanceConfig = AcceptanceConfig()
    """When a drafted token is accepted."""
    adaptive: AdaptiveConfig = AdaptiveConfig()
    """Whether only the drafts that are likely to be accepted are verified."""
    max_new_tokens: int = 4096
    """Cap on a request's output."""
    max_answer_tokens: int = 256
    """Cap on its answer."""
    eos_in_think: EosInThink = "force_think_end"
    """A stop token inside the thinking becomes the think end, or ends the request (`stop`)."""
    batch_size: int = 32
    """Requests decoded together."""
    output: Path | None = None
    """JSONL file for the task's outputs, one line per problem; it must not exist, and appears when all are done."""
    plain: bool = False
    """Prompt a model that has no chat template with the bare text."""
    seed: int = 0
    """Which problems of the task."""

    def __post_init__(self) -> None:
        """Checks the counts, and refuses what would be ignored."""
        for name in ("problems", "max_new_tokens", "max_answer_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if self.problems > _MOST_PROBLEMS:
            raise ValueError(f"problems must be <= {_MOST_PROBLEMS:,}, not {self.problems:,}; run them in parts")
        if self.prompt is None and self.contract is not None:
            raise ValueError("contract goes with --prompt; the contract of a task's problems is --task.contract")
        defaults = {"task": TaskConfig(), "problems": 32, "output": None}
        ignored = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.prompt is not None and ignored:
            raise ValueError(f"{', '.join(ignored)} would be ignored with --prompt; leave out one or the other")


def run(config: RunConfig) -> None:
    """Runs a prompt or a task.

    Raises:
        ValueError: The head belongs to another target, or the recipe is contradictory.
        OSError: The output cannot be written; that is found before a model is loaded.
    """
    from ace_learn.engines.loading import build_engine
    from ace_learn.models.target import load_target

    if config.output is not None and config.output.exists():
        raise ValueError(f"{config.output} exists already; name another --output or delete it")
    contract = None if config.contract is None else Contract.from_spec(config.contract)
    examples = list(build_task(config.task).examples(config.problems, config.seed)) if config.prompt is None else []
    with nullcontext() if config.output is None else atomic_file(config.output) as file:
        engine = build_engine(
            load_target(config.target),
            head=config.head,
            sampling=config.sampling,
            batch_size=config.batch_size,
            drafter=config.drafter,
            acceptance=config.acceptance,
            adaptive=config.adaptive,
        )
        if config.prompt is None:
            _run_task(config, engine, examples, file)
        else:
            _show_prompt(config, engine, config.prompt, contract)


def _request(
    config: RunConfig, target: Target, key: int, messages: Sequence[Message], contract: Contract | None
) -> Request:
    from ace_learn.engines.requests import Request
    from ace_learn.tasks import render_prompt

    prompt = render_prompt(target.tokenizer, messages, thinking=True, markers=target.markers, plain=config.plain)
    return Request(
        key=key,
        prompt_ids=tuple(prompt),
        contract=contract,
        max_new_tokens=config.max_new_tokens,
        max_answer_tokens=config.max_answer_tokens,
        eos_in_think=config.eos_in_think,
    )


class _Printer:
    """Prints a request's text as it comes, with the signals behind each paragraph."""

    def __init__(self, target: Target) -> None:
        from ace_learn.contracts.stream import Detokenizer

        self.target = target
        self.detokenizer = Detokenizer(target.decode)

    def __call__(self, live: LiveRequest, tokens: Sequence[int], passed: Sequence[BoundarySignals]) -> None:
        """Prints a window; a boundary is shown behind its own token, which stands in this window or before it."""
        before = live.length - len(tokens)
        waiting = list(passed)
        for index in range(before, live.length + 1):
            while waiting and waiting[0].output_index < index:
                self._mark(waiting.pop(0))
            if live.exit is not None and live.exit.output_index == index and index < live.length:
                print("    [exit]", flush=True)
            if index < live.length:
                sys.stdout.write(self.detokenizer.push(tokens[index - before]))
        sys.stdout.flush()

    def _mark(self, boundary: BoundarySignals) -> None:
        shown = "  ".join(f"{name} {value:.3g}" for name, value in boundary.signals.items())
        print(f"    [paragraph {boundary.paragraphs}, {boundary.tokens_thought} tokens: {shown}]", flush=True)


def _show_prompt(config: RunConfig, engine: HFEngine, prompt: str, contract: Contract | None) -> None:
    from ace_learn.tasks.base import user_message

    request = _request(config, engine.target, config.seed, user_message(prompt), contract)
    output = engine.generate([request], listener=_Printer(engine.target))[0]
    print(f"\n\n{_ending(output)}: {output.think_tokens} tokens thought, {len(output.token_ids)} in all")
    answer = json.dumps(output.answer) if contract else "not looked for; name its form with --contract '{kind: ...}'"
    print(f"answer: {answer} (finish: {output.finish_reason}, {output.seconds:.2f} s)")
    _print_speculation([output])


def _ending(output: Output) -> str:
    if output.exit is not None:
        return f"thinking ended by the policy after {output.exit.paragraphs} paragraphs"
    if output.think_start is None:
        return "thinking never began"
    return "thinking was cut by the token limit" if output.think_end is None else "thinking ended by itself"


def _run_task(config: RunConfig, engine: HFEngine, examples: Sequence[Example], file: TextIO | None) -> None:
    """Decodes the problems; each finished batch goes to the file, which the caller gives its name in the end."""
    from tqdm import tqdm

    requests = [_request(config, engine.target, i, e.messages, e.contract) for i, e in enumerate(examples)]
    outputs: list[Output] = []
    correct: list[bool] = []
    with tqdm(total=len(requests), unit="problem", desc="run") as bar:
        for batch in engine.stream_batches(requests):
            judged = [examples[output.key].correct(output.answer) for output in batch]
            if file is not None:
                lines = [json.dumps(output_json(o) | {"correct": c}) for o, c in zip(batch, judged, strict=True)]
                file.write("\n".join(lines) + "\n")
                file.flush()
            outputs.extend(batch)
            correct.extend(judged)
            bar.update(len(batch))
    _print_summary(outputs, correct, engine.policy.predicate)


def _print_summary(outputs: Sequence[Output], correct: Sequence[bool], predicate: str) -> None:
    count = len(outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    exits = "the policy `never` exits" if predicate == "never" else f"{sum(o.exit is not None for o in outputs)} exits"
    print(
        f"{count} problems: {sum(correct) / count:.1%} correct, {exits}, "
        f"{sum(o.think_tokens for o in outputs) / count:.1f} tokens thought and {tokens / count:.1f} in all per problem"
    )
    _print_speculation(outputs)


def _print_speculation(outputs: Sequence[Output]) -> None:
    tokens = sum(len(output.token_ids) for output in outputs)
    steps = sum(output.stats.verify_steps for output in outputs)
    drafted = sum(output.stats.drafted for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    if drafted:
        print(
            f"speculation: {accepted / steps:.2f} drafts accepted and {tokens / steps:.2f} tokens emitted per verify "
            f"step, {accepted / drafted:.1%} of {drafted:,} drafts accepted"
        )
        spent = sum(output.stats.kl_spent for output in outputs)
        if spent:
            print(f"acceptance rule: {spent / tokens:.4f} nats per token spent on KL(h||q)")


def output_json(output: Output) -> dict[str, object]:
    """A request's outcome with its audit record."""
    audit = None
    if output.exit is not None:
        audit = {
            "tokens_thought": output.exit.tokens_thought,
            "paragraphs": output.exit.paragraphs,
            "signals": output.exit.signals,
            "reason": output.exit.reason,
        }
    return {
        "key": output.key,
        "answer": output.answer,
        "answer_text": output.answer_text,
        "finish_reason": output.finish_reason,
        "think_tokens": output.think_tokens,
        "tokens": len(output.token_ids),
        "exit": audit,
        "verify_steps": output.stats.verify_steps,
        "drafted": output.stats.drafted,
        "accepted": output.stats.accepted,
        "accepted_histogram": output.stats.histogram,
        "kl_spent": output.stats.kl_spent,
        "seconds": output.seconds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    run_command(
        RunConfig,
        run,
        description="Decode with learned exits: a task's problems, or one --prompt shown live.",
        argv=argv,
        resumes=False,
    )
