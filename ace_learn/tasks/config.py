"""Tasks by name, as recipes give them."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from ace_learn.contracts import Contract
from ace_learn.tasks.base import Task
from ace_learn.tasks.json_object import JsonObject

_GYM = "reasoning-gym"
_TABLE_FIELDS = ("contract", "instruct", "prompt_column", "messages_column", "gold_column", "contract_column")
_FIELDS = {
    "reasoner": ("families",),
    "table": ("path", "family_column", *_TABLE_FIELDS),
    "hub": ("hub", "subset", "split", "family_column", *_TABLE_FIELDS),
    _GYM: ("contract", "instruct", "params"),
}
"""Which fields each task reads; a value in another one would be ignored, so it is refused."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Where the problems come from."""

    name: str = "reasoner"
    """`reasoner` (built in), `table` (a file), `hub` (a Hugging Face data set) or `reasoning-gym:<task>`."""
    families: tuple[str, ...] = ()
    """reasoner: families to mix in equal shares; all if empty."""
    path: Path | None = None
    """table: a jsonl, json, parquet or csv file."""
    hub: str | None = None
    """hub: name of the data set, or a local folder laid out like one."""
    subset: str | None = None
    """hub: name of the subset."""
    split: str = "train"
    """hub: which split of the data set to read; ours are made from it."""
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
    if kind not in _FIELDS or (kind == _GYM) != bool(detail):
        raise ValueError(f"unknown task {config.name!r}; known: reasoner, table, hub, {_GYM}:<task>")
    _refuse_unread(config, kind)
    if kind == "reasoner":
        from ace_learn.tasks.reasoner import ReasonerTask

        return ReasonerTask(config.families)
    contract = None if config.contract is None else Contract.from_spec(config.contract)
    if kind == _GYM:
        return _gym(config, detail, contract)
    return _table(config, kind, contract)


def _gym(config: TaskConfig, name: str, contract: Contract | None) -> Task:
    from ace_learn.tasks.reasoning_gym import ReasoningGymTask

    if contract is None:
        raise ValueError(f"{config.name} needs a contract, such as --task.contract '{{kind: integer}}'")
    return ReasoningGymTask(name, contract=contract, params=config.params, instruct=config.instruct)


def _table(config: TaskConfig, kind: str, contract: Contract | None) -> Task:
    from ace_learn.tasks.table import Columns, TableTask, load_file, load_hub

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
        rows, source = load_hub(config.hub, subset=config.subset, split=config.split), config.hub
    else:
        if config.path is None:
            raise ValueError("the task `table` needs --task.path, a jsonl, json, parquet or csv file")
        rows, source = load_file(config.path), config.path.name
    return TableTask(rows, columns, source=source, contract=contract, instruct=config.instruct)


def _refuse_unread(config: TaskConfig, kind: str) -> None:
    default = TaskConfig()
    for entry in fields(config):
        read = entry.name == "name" or entry.name in _FIELDS[kind]
        if not read and getattr(config, entry.name) != getattr(default, entry.name):
            raise ValueError(f"the task {kind!r} does not read {entry.name!r}; it reads {', '.join(_FIELDS[kind])}")
