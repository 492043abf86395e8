"""In the process that answers clients: keeps finished audit records, counts them, and cuts texts at the commit.

`install_observer` wraps one method, `OutputProcessor.process_outputs`. Outputs without a record of ours pass untouched.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from ace_learn.contracts import JSON
from ace_learn.engines.vllm.audit import KEY
from ace_learn.engines.vllm.metrics import metrics
from ace_learn.engines.vllm.settings import Settings
from ace_learn.engines.vllm.sink import AuditSink

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessorOutput, RequestState
    from vllm.v1.engine.parallel_sampling import ParentRequest

Record = dict[str, JSON]


class Finished(NamedTuple):
    """A record, and whose it is."""

    request_id: str
    """As the client knows it."""
    choice: int
    """Which of its `n`."""
    record: Record


class AuditStore:
    """The records of the newest finished requests; of this process alone."""

    def __init__(self, size: int) -> None:
        """Keeps the choices of `size` requests."""
        self._size = size
        self._records: OrderedDict[str, dict[int, Record]] = OrderedDict()

    def add(self, finished: Finished) -> None:
        """Keeps a record, and forgets the oldest beyond the size."""
        choices = self._records.pop(finished.request_id, {})
        choices[finished.choice] = finished.record
        self._records[finished.request_id] = choices
        while len(self._records) > self._size:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> list[Record] | None:
        """The records of a request by choice, each with its `request_id` and `index`; None if none is kept.

        A completion call with several prompts runs as several requests, `ID-0`, `ID-1` and so on; its own id finds them
        all.
        """
        names = [request_id]
        while f"{request_id}-{len(names) - 1}" in self._records:
            names.append(f"{request_id}-{len(names) - 1}")
        found = [
            {"request_id": name, "index": index, **record}
            for name in names
            for index, record in sorted(self._records.get(name, {}).items())
        ]
        return found or None

    def __len__(self) -> int:
        return len(self._records)


class Observer:
    """Sees the finished outputs of a process."""

    def __init__(self, settings: Settings) -> None:
        """Prepares the store, and the file where the settings name one."""
        self.store = AuditStore(settings.audit_records)
        self.metrics = metrics()
        self.sink: AuditSink | None = None
        if settings.audit_log is not None:
            self.sink = AuditSink(
                Path(settings.audit_log),
                max_bytes=settings.audit_log_bytes,
                num_files=settings.audit_log_files,
                on_error=self.metrics.log_errors.inc,
            )
        self._choices: WeakKeyDictionary[ParentRequest, dict[int, Record]] = WeakKeyDictionary()

    def prepare(self, processor: OutputProcessor, outputs: Sequence[EngineCoreOutput]) -> list[Finished]:
        """Before vLLM reads a step's outputs: the records among them, with everything set for their texts."""
        found = []
        for output in outputs:
            record: Record | None = (output.kv_transfer_params or {}).get(KEY)
            state = None if record is None else processor.request_states.get(output.request_id)
            if record is not None and state is not None:
                _set_text_end(state.detokenizer, output, record)
                found.append(self._of_client(state, output, record))
        return found

    def publish(self, finished: Sequence[Finished]) -> None:
        """Keeps, counts and writes records."""
        for item in finished:
            self.store.add(item)
            self.metrics.observe(item.record)
            if self.sink is not None:
                self.sink.write(
                    {"time": time.time(), "request_id": item.request_id, "index": item.choice, **item.record}
                )

    def _of_client(self, state: RequestState, output: EngineCoreOutput, record: Record) -> Finished:
        parent = state.parent_req
        if parent is None:
            return Finished(state.external_req_id, state.request_index, record)
        if parent.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY:
            # The one output of all choices takes the parameters of the choice that ends last.
            choices = self._choices.setdefault(parent, {})
            choices[state.request_index] = record
            output.kv_transfer_params = {
                **output.kv_transfer_params,
                KEY: [{"index": index, **choices[index]} for index in sorted(choices)],
            }
        return Finished(parent.external_req_id, state.request_index, record)


def _set_text_end(detokenizer: IncrementalDetokenizer | None, output: EngineCoreOutput, record: Record) -> None:
    """Keeps the last token's text, up to the answer's end; vLLM leaves out the token of a stop in the engine core."""
    if not isinstance(detokenizer, BaseIncrementalDetokenizer):
        return
    update = detokenizer.update
    if record["finish_reason"] == "contract":
        cut = record["cut"]
        assert isinstance(cut, int)
        detokenizer.update = partial(_update_to_commit, detokenizer, update, cut)
    elif isinstance(output.stop_reason, str):
        detokenizer.update = partial(_update_to_stop, update)


def _update_to_stop(
    update: Callable[[list[int], bool], str | None], new_token_ids: list[int], stop_terminated: bool
) -> str | None:
    return update(new_token_ids, False)


def _update_to_commit(
    detokenizer: BaseIncrementalDetokenizer,
    update: Callable[[list[int], bool], str | None],
    cut: int,
    new_token_ids: list[int],
    stop_terminated: bool,
) -> str | None:
    """Reads the tokens of the last step; in the token of the commit no stop string counts."""
    stopped = update(new_token_ids[:-1], False)
    if stopped is not None:
        return stopped
    before = len(detokenizer.output_text)
    stops, detokenizer.stop = detokenizer.stop, []
    update(new_token_ids[-1:], False)
    detokenizer.stop = stops
    end = max(before, len(detokenizer.output_text) - cut)
    detokenizer.output_text = detokenizer.output_text[:end]
    return None


_MARK = "_ace_learn_observer"


def install_observer(settings: Settings) -> Observer:
    """Lets this process see what its engines finish; a second call replaces the observer of the first."""
    current = observer()
    if current is not None and current.sink is not None:
        current.sink.close()
    if current is None:
        OutputProcessor.process_outputs = _observed(OutputProcessor.process_outputs)
    new = Observer(settings)
    setattr(OutputProcessor, _MARK, new)
    return new


def observer() -> Observer | None:
    """The observer of this process; None where no engine is configured for ace_learn."""
    found = getattr(OutputProcessor, _MARK, None)
    assert found is None or isinstance(found, Observer)
    return found


def _observed(original: Callable[..., OutputProcessorOutput]) -> Callable[..., OutputProcessorOutput]:
    @wraps(original)
    def process_outputs(
        self: OutputProcessor, engine_core_outputs: Sequence[EngineCoreOutput], *args: object, **kwargs: object
    ) -> OutputProcessorOutput:
        current = observer()
        assert current is not None, "the wrapper was installed together with an observer"
        finished = current.prepare(self, engine_core_outputs)
        result = original(self, engine_core_outputs, *args, **kwargs)
        current.publish(finished)
        return result

    return process_outputs
