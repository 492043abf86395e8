"""Tasks of the `reasoning_gym` library, under a contract that the recipe gives."""

import difflib
import hashlib
import json
import sys
from collections.abc import Iterator
from functools import partial

import reasoning_gym
from reasoning_gym.factory import DATASETS, ProceduralDataset

from ace_learn.contracts import JSON, Contract
from ace_learn.tasks.base import Example, distinct, read_gold, user_message, with_instruction
from ace_learn.tasks.json_object import JsonObject

_SIZE = sys.maxsize


class ReasoningGymTask:
    """One procedural data set of `reasoning_gym`."""

    def __init__(self, name: str, *, contract: Contract, params: JsonObject, instruct: bool) -> None:
        """Makes the data set once, to see that its name and parameters are right.

        Args:
            name: The library's name of the data set, such as "leg_counting".
            contract: What counts as an answer; the library's own answers must be legal under it.
            params: Parameters of the data set.
            instruct: End each prompt with the contract's own instruction.

        Raises:
            ValueError: The name or a parameter is wrong.
        """
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5) or sorted(DATASETS)[:5]
            raise ValueError(
                f"reasoning_gym has no task {name!r}; did you mean {', '.join(near)}? It has {len(DATASETS)}, "
                "listed by `python -c 'from reasoning_gym.factory import DATASETS; print(*DATASETS)'`"
            )
        for reserved in ("seed", "size"):
            if reserved in params:
                raise ValueError(f"params of reasoning-gym:{name}: {reserved!r} is set by the command; remove it")
        try:
            reasoning_gym.create_dataset(name, seed=0, size=1, **params)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"params of reasoning-gym:{name}: {error}") from error
        self.name = name
        self._contract = contract
        self._params = params
        self._instruct = instruct

    def examples(self, count: int, seed: int) -> Iterator[Example]:
        """Yields `count` distinct problems; see `Task`."""
        return distinct(self._stream(seed), count, source=f"reasoning-gym:{self.name}")

    def _stream(self, seed: int) -> Iterator[Example]:
        # Item i of seed s is the library's item 0 of seed s + i, so that nearby seeds would share nearly all items.
        far_seed = int.from_bytes(hashlib.sha256(f"{self.name}/{seed}".encode()).digest()[:6])
        dataset = reasoning_gym.create_dataset(self.name, seed=far_seed, size=_SIZE, **self._params)
        for index, entry in enumerate(dataset):
            messages = user_message(str(entry["question"]).strip())
            yield Example(
                family=self.name,
                messages=with_instruction(messages, self._contract) if self._instruct else messages,
                contract=self._contract,
                gold=read_gold(self._contract, entry["answer"], where=f"reasoning-gym:{self.name}, item {index}"),
                verifier=partial(_verify, dataset, entry),
            )


def _verify(dataset: ProceduralDataset, entry: dict[str, object], answer: JSON) -> bool:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return float(dataset.score_answer(text, entry)) == 1.0
