"""The reasoner's training data: an endless stream of batches that can be entered at any step."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerFast

from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.problems import FAMILIES, Problem, draw_problem
from ace_learn.reasoner.tokenizer import END_OF_TEXT, THINK_END, THINK_START, TURN_END, token_id, train_tokenizer
from ace_learn.reasoner.traces import BREAK, Trace, write_trace

IGNORED = -100
"""The label of tokens that carry no loss."""
BATCHES_PER_CHUNK = 8
"""So many batches are drawn together and sorted by length, which saves padding."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids and labels of some traces, padded on the right."""

    input_ids: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class EncodedTrace:
    """One trace as tokens; the first `prompt_length` of them carry no loss."""

    token_ids: list[int]
    prompt_length: int


def encode_trace(tokenizer: PreTrainedTokenizerFast, problem: Problem, trace: Trace) -> EncodedTrace:
    """Write the whole conversation as the chat template would."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.prompt}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=bool(trace.think),
    )
    thought = f"{THINK_START}\n{trace.think}{THINK_END}{BREAK}" if trace.think else ""
    prompt_ids = tokenizer.encode(str(prompt), add_special_tokens=False)
    reply_ids = tokenizer.encode(f"{thought}{trace.answer}{TURN_END}", add_special_tokens=False)
    return EncodedTrace(token_ids=[*prompt_ids, *reply_ids], prompt_length=len(prompt_ids))


def collate(encoded: list[EncodedTrace], *, pad_id: int) -> Batch:
    """Pad traces on the right to a multiple of eight tokens."""
    width = -(-max(len(trace.token_ids) for trace in encoded) // 8) * 8
    input_ids = torch.full((len(encoded), width), pad_id, dtype=torch.long)
    labels = torch.full((len(encoded), width), IGNORED, dtype=torch.long)
    for row, trace in enumerate(encoded):
        ids = torch.tensor(trace.token_ids)
        input_ids[row, : len(ids)] = ids
        labels[row, trace.prompt_length : len(ids)] = ids[trace.prompt_length :]
    return Batch(input_ids=input_ids, labels=labels)


class TraceStream(IterableDataset[Batch]):
    """The endless stream of batches, entered at any step."""

    def __init__(
        self, config: ReasonerTrainingConfig, tokenizer: PreTrainedTokenizerFast, first_step: Callable[[], int]
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.first_step = first_step

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from step `first_step()` on."""
        step = self.first_step()
        while True:
            chunk = self.draw_chunk(step // BATCHES_PER_CHUNK)
            for batch in chunk[step % BATCHES_PER_CHUNK :]:
                yield batch
                step += 1

    def draw_chunk(self, index: int) -> list[Batch]:
        """Draw the batches of one chunk: traces sorted by length, batches in random order."""
        rng = random.Random(f"reasoner/{self.config.seed}/{index}")
        weights = self.config.family_weights
        families = rng.choices(list(weights), list(weights.values()), k=self.config.batch_size * BATCHES_PER_CHUNK)
        problems = [draw_problem(family, rng) for family in families]
        encoded = [encode_trace(self.tokenizer, problem, write_trace(problem, rng)) for problem in problems]
        encoded.sort(key=lambda trace: len(trace.token_ids))
        size = self.config.batch_size
        parts = [encoded[at : at + size] for at in range(0, len(encoded), size)]
        rng.shuffle(parts)
        pad_id = token_id(self.tokenizer, END_OF_TEXT)
        return [collate(part, pad_id=pad_id) for part in parts]


class TraceDataModule(lightning.LightningDataModule):
    """Serves the stream from the trainer's own step, which a checkpoint restores."""

    def __init__(self, config: ReasonerTrainingConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of ready-made batches."""
        return DataLoader(TraceStream(self.config, self.tokenizer, self._step), batch_size=None)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move both tensors."""
        return Batch(input_ids=batch.input_ids.to(device), labels=batch.labels.to(device))

    def _step(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step


def build_tokenizer(config: ReasonerTrainingConfig) -> PreTrainedTokenizerFast:
    """Train the tokenizer on traces of the configured seed."""
    rng = random.Random(f"reasoner/{config.seed}/tokenizer")
    texts: list[str] = []
    for index in range(config.tokenizer_samples):
        problem = draw_problem(FAMILIES[index % len(FAMILIES)], rng)
        trace = write_trace(problem, rng)
        texts.append(f"user\n{problem.prompt}assistant\n{trace.think}{trace.answer}")
    return train_tokenizer(texts, vocab_size=config.vocab_size)
