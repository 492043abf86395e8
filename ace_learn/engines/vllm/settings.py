"""What a server is configured with: the object that `--additional-config` carries to every process of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, cast, get_args

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.contracts import Contract
from ace_learn.exit.policy import ExitPolicy, load_policy
from ace_learn.tasks import JsonObject

KEY = "ace_learn"
"""The key of the object in vLLM's `additional_config`; without it nothing of this package acts."""

Exits = Literal["asked", "always"]
AcceptanceRule = Literal["standard", "cactus", "cactus_exact"]

_LARGEST = 2**53
_FINITE = 1e300


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How drafted tokens are accepted."""

    rule: AcceptanceRule = "standard"
    """`standard` is vLLM's own, lossless; `cactus` and `cactus_exact` accept more and change the law of the output."""
    delta: float = 0.0
    """cactus, cactus_exact: bound on KL(h||q) per drafted token, in nats."""
    only_in_think: bool = False
    """cactus, cactus_exact: apply the rule to the think span alone."""

    def __post_init__(self) -> None:
        """Checks ranges, and that nothing would be ignored."""
        if self.rule == "standard":
            if self.delta != 0.0 or self.only_in_think:
                raise ValueError(
                    "acceptance.delta and acceptance.only_in_think are not read by the rule 'standard'; choose "
                    "'cactus_exact', or leave them out"
                )
        elif not 0.0 < self.delta < _FINITE:
            raise ValueError(f"acceptance.delta must be a positive number of nats, such as 0.1, not {self.delta}")

    @classmethod
    def from_json(cls, data: JSON) -> Acceptance:
        """Reads a JSON object; what it leaves out has its default.

        Raises:
            ValueError: An unknown key, or a value that no server can have.
        """
        read = _fields(data, asdict(cls()), where=f"additional_config.{KEY}.acceptance")
        return cls(
            rule=cast(AcceptanceRule, _choice(read, "rule", get_args(AcceptanceRule))),
            delta=read.number("delta"),
            only_in_think=read.boolean("only_in_think"),
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the plugin does on a server."""

    head: str | None = None
    """Head folder with its policy.json, as `calibrate` wrote it; None: contracts only."""
    exits: Exits = "asked"
    """Which requests end their thinking early: those that ask (`ace_enabled`), or `always` all that do not refuse."""
    shadow: bool = False
    """Compute and record every exit, but force none; with runtime_switch, until it is switched."""
    shadow_fraction: float = 0.0
    """Share of the requests that are shadowed all the same (by a hash of the request id), to measure drift."""
    contracts: dict[str, JsonObject] = field(default_factory=dict)
    """Name -> contract spec: the names that a request's `ace_contract` may give."""
    audit_log: str | None = None
    """File that gets a JSON line per request, answers included; mode 0600. None: no such file."""
    audit_log_bytes: int = 64 << 20
    """audit_log: size in bytes at which the file is rotated."""
    audit_log_files: int = 4
    """audit_log: files that are kept, the current one included."""
    audit_records: int = 4096
    """Finished requests whose records `GET /ace/audit/{request_id}` can give; 0: none."""
    max_failures: int = 16
    """Failures inside the hook after which it is off until the server is started again."""
    compile: bool = False
    """Compile the exit rule when the server starts: less time per step, for a start that takes longer the first time
    (half a minute to minutes, then seconds). Needs a C++ compiler on a CPU, Triton on a GPU. On a CPU without
    speculation there is nothing to compile where the policy smooths over boundaries: the rule is plain Python."""
    runtime_switch: bool = False
    """Whether `POST /ace/shadow` may switch shadow mode while the server runs."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """How drafted tokens are accepted."""

    def __post_init__(self) -> None:
        """Checks ranges, and that nothing would be ignored."""
        if not 0.0 <= self.shadow_fraction <= 1.0:
            raise ValueError(f"shadow_fraction must be a share from 0 to 1, not {self.shadow_fraction}")
        for name, value, least in (
            ("audit_log_bytes", self.audit_log_bytes, 1024),
            ("audit_log_files", self.audit_log_files, 1),
            ("audit_records", self.audit_records, 0),
            ("max_failures", self.max_failures, 1),
        ):
            if not least <= value < _LARGEST:
                raise ValueError(f"{name} must be from {least} to below {_LARGEST}, not {value}")
        if "" in (self.head, self.audit_log):
            raise ValueError("head and audit_log are paths, or left out; they must not be empty")
        if self.head is None:
            self._refuse(("exits", "shadow", "shadow_fraction", "compile", "runtime_switch", "max_failures"), "head")
        if self.audit_log is None:
            self._refuse(("audit_log_bytes", "audit_log_files"), "audit_log")
        if self.shadow and self.shadow_fraction > 0:
            raise ValueError("with shadow every request is shadowed; leave out shadow_fraction, or shadow")
        _check_contracts(self.contracts)

    def _refuse(self, names: tuple[str, ...], needed: str) -> None:
        """Refuses values that only mean something beside another one that is not there."""
        defaults = {item.name: item.default for item in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} is not read without {needed}; set {needed}, or leave {name} out")

    def to_json(self) -> dict[str, JSON]:
        """A JSON object that `from_json` reads."""
        return cast(dict[str, JSON], asdict(self))

    @classmethod
    def from_json(cls, data: JSON) -> Settings:
        """Reads the object of `additional_config`; what it leaves out has its default.

        Raises:
            ValueError: An unknown key, or a value that no server can have.
        """
        read = _fields(data, cls().to_json(), where=f"additional_config.{KEY}")
        return cls(
            head=_path(read, "head"),
            exits=cast(Exits, _choice(read, "exits", get_args(Exits))),
            shadow=read.boolean("shadow"),
            shadow_fraction=read.number("shadow_fraction"),
            contracts={name: read.fields("contracts").fields(name).data for name in read.fields("contracts").data},
            audit_log=_path(read, "audit_log"),
            audit_log_bytes=read.integer("audit_log_bytes"),
            audit_log_files=read.integer("audit_log_files"),
            audit_records=read.integer("audit_records"),
            max_failures=read.integer("max_failures"),
            compile=read.boolean("compile"),
            runtime_switch=read.boolean("runtime_switch"),
            acceptance=Acceptance.from_json(read.get("acceptance")),
        )

    def policy(self) -> ExitPolicy | None:
        """The policy beside the head; None without a head. That it is this head's own is checked with the weights.

        Raises:
            ValueError: The folder holds no policy, or a damaged one.
        """
        return None if self.head is None else load_policy(Path(self.head))


def settings_of(additional_config: object) -> Settings | None:
    """The settings in vLLM's `additional_config`; None where the server is not configured for this package.

    Raises:
        ValueError: The object has an unknown key or a wrong value.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    return Settings.from_json(additional_config[KEY])


def _fields(data: JSON, defaults: Mapping[str, JSON], *, where: str) -> JsonFields:
    """The fields of an object with the defaults of those that it leaves out."""
    given = JsonFields.of(data, where=where)
    unknown = [name for name in given.data if name not in defaults]
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r} in {where}; known: {', '.join(defaults)}")
    return JsonFields(data={**defaults, **given.data}, where=where)


def _choice(read: JsonFields, name: str, known: tuple[str, ...]) -> str:
    value = read.text(name)
    if value not in known:
        raise ValueError(f"{read.where}: {name} is {value!r}; known: {', '.join(known)}")
    return value


def _path(read: JsonFields, name: str) -> str | None:
    return None if read.get(name) is None else read.text(name)


def _check_contracts(contracts: Mapping[str, JsonObject]) -> None:
    for name, spec in contracts.items():
        if not name or name.lstrip().startswith("{"):
            raise ValueError(f"a contract cannot be called {name!r}: a name is not empty and is no JSON text")
        try:
            Contract.from_spec(spec)
        except ValueError as error:
            raise ValueError(f"contracts.{name}: {error}") from error
