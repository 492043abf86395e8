"""Tasks by name, as recipes give them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ace_learn.contracts import Contract
from ace_learn.tasks.base import Task
from ace_learn.tasks.json_object import JsonObject
from ace_learn.tasks.sets import data_set_names

_GYM = "reasoning-gym"
_TABLE_FIELDS = ("contract", "instruct", "prompt_column", "messages_column", "gold_column", "contract_column")
_FIELDS = {
    "reasoner": ("families",),
    "table": ("path", "family_column", *_TABLE_FIELDS),
    "hub": ("hub", "subset", "split", "family_column", *_TABLE_FIELDS),
    _GYM: ("contract", "instruct", "params"),
}
"""Which fields each task reads; a value in another one would be ignored, so it is refused."""
_DATA_SET_FIELDS = ("path", "hub", "subset", "split", "instruct")
"""The same for public data sets; those whose answers are run read `execute_code`, too."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Where the problems come from."""

    name: str = "reasoner"
    """`reasoner` (built in), a public data set (`gsm8k`, `math500`, ...; docs/tasks.md lists them), `table` (a file),
    `hub` (any data set of the Hugging Face hub) or `reasoning-gym:<task>`."""
    families: tuple[str, ...] = ()
    """reasoner: families to mix in equal shares; all if empty."""
    path: Path | None = None
    """table: a jsonl, json, parquet or csv file. Public data set: a folder with a copy of it, instead of the hub."""
    hub: str | None = None
    """hub: name of the data set, or a local folder laid out like one. Public data set: a copy under another name."""
    subset: str | None = None
    """hub, public data set: name of the subset; None: the default one."""
    split: str | None = None
    """hub, public data set: which split of the data set to read, or several joined by "+"; ours are made from it.
    None: `train` (hub), or the one that docs/tasks.md names."""
    execute_code: bool = False
    """humaneval_plus: allow that code which the model wrote is run on this machine, to score it."""
    params: JsonObject = field(default_factory=dict)
    """reasoning-gym: parameters of the task."""
    contract: JsonObject | None = None
    """What counts as an answer, for all problems, such as {kind: integer}."""
    instruct: bool = True
    """End each prompt with the contract's own instruction."""
    prompt_column: str | None = "prompt"
    """table, hub: column of prompts."""
    messages_column: str | None = None
    """table, hub: column of chats ([{role, content}]); then prompt_column is not read."""
    gold_column: str | None = None
    """table, hub: column of right answers."""
    contract_column: str | None = None
    """table, hub: column of contract specs, instead of `contract`."""
    family_column: str | None = None
    """table, hub: column with the kind of problem, for tables by kind."""


def build_task(config: TaskConfig) -> Task:
    """Makes the task that a recipe names.

    Raises:
        ValueError: The name is unknown, a value is missing, wrong, or not read by this task, or the data set is empty.
        OSError: A file cannot be read.
    """
    kind, _, detail = config.name.partition(":")
    if kind == config.name and kind in data_set_names():
        return _data_set(config)
    if kind not in _FIELDS or (kind == _GYM) != bool(detail):
        known = ", ".join(("reasoner", "table", "hub", f"{_GYM}:<task>", *data_set_names()))
        raise ValueError(f"unknown task {config.name!r}; known: {known}")
    _refuse_unread(config, _FIELDS[kind])
    if kind == "reasoner":
        from ace_learn.tasks.reasoner import ReasonerTask

        return ReasonerTask(config.families)
    contract = None if config.contract is None else Contract.from_spec(config.contract)
    if kind == _GYM:
        return _gym(config, detail, contract)
    return _table(config, kind, contract)


def _data_set(config: TaskConfig) -> Task:
    from ace_learn.tasks.data_set import DataSetTask, find_data_set
    from ace_learn.tasks.loading import load_hub

    data_set = find_data_set(config.name)
    _refuse_unread(config, (*_DATA_SET_FIELDS, "execute_code") if data_set.executes_code else _DATA_SET_FIELDS)
    if config.path is not None and config.hub is not None:
        raise ValueError("give either path (a folder) or hub (a name), not both")
    if config.path is not None and not config.path.is_dir():
        raise ValueError(f"{config.path} is no folder; --task.path takes one laid out like {data_set.hub}")
    if data_set.executes_code:
        _allow_execution(config)
    copy = config.hub if config.path is None else str(config.path)
    rows = load_hub(
        data_set.hub if copy is None else copy,
        subset=data_set.subset if config.subset is None else config.subset,
        split=data_set.split if config.split is None else config.split,
        flag="--task.path",
        gated=data_set.gated and copy is None,
    )
    return DataSetTask(config.name, data_set, rows, instruct=config.instruct)


def _allow_execution(config: TaskConfig) -> None:
    from ace_learn.tasks.execution import require_execution

    if not config.execute_code:
        raise ValueError(
            f"the task {config.name!r} scores answers by running code that the model wrote, on this machine and with "
            "your rights (in a process of its own with limits on time, memory and files, but in no sandbox); allow it "
            "with --task.execute_code true, best in a container"
        )
    require_execution()


def _gym(config: TaskConfig, name: str, contract: Contract | None) -> Task:
    from ace_learn.tasks.reasoning_gym import ReasoningGymTask

    if contract is None:
        raise ValueError(f"{config.name} needs a contract, such as --task.contract '{{kind: integer}}'")
    return ReasoningGymTask(name, contract=contract, params=config.params, instruct=config.instruct)


def _table(config: TaskConfig, kind: str, contract: Contract | None) -> Task:
    from ace_learn.tasks.loading import load_file, load_hub
    from ace_learn.tasks.table import Columns, TableTask

    columns = Columns(
        prompt=config.prompt_column,
        messages=config.messages_column,
        gold=config.gold_column,
        contract=config.contract_column,
        family=config.family_column,
    )
    if config.prompt_column is None and config.messages_column is None:
        raise ValueError("give prompt_column or messages_column")
    if kind == "hub":
        if config.hub is None:
            raise ValueError("the task `hub` needs --task.hub, the data set's name")
        split = "train" if config.split is None else config.split
        rows, source = load_hub(config.hub, subset=config.subset, split=split, flag="--task.hub"), config.hub
    else:
        if config.path is None:
            raise ValueError("the task `table` needs --task.path, a jsonl, json, parquet or csv file")
        rows, source = load_file(config.path), config.path.name
    return TableTask(rows, columns, source=source, contract=contract, instruct=config.instruct)


def _refuse_unread(config: TaskConfig, read: Sequence[str]) -> None:
    default = TaskConfig()
    for entry in fields(config):
        is_read = entry.name == "name" or entry.name in read
        if not is_read and getattr(config, entry.name) != getattr(default, entry.name):
            raise ValueError(f"the task {config.name!r} does not read {entry.name!r}; it reads {', '.join(read)}")
