"""What one request asks for: the `ace_` keys of `SamplingParams.extra_args`, over HTTP `vllm_xargs`.

Read by the API process, which refuses a bad request before it runs, by the scheduler and by the worker; all three see
the same keys and the same request id, so they agree.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, cast, runtime_checkable

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.contracts import Contract
from ace_learn.engines.vllm.settings import Settings
from ace_learn.exit.policy import ExitPolicy
from ace_learn.signals import LEARNED

PREFIX = "ace_"
ENABLED = "ace_enabled"
SHADOW = "ace_shadow"
MIN_THINKING_TOKENS = "ace_min_thinking_tokens"
PATIENCE = "ace_patience"
THRESHOLD = "ace_threshold"
CONTRACT = "ace_contract"
KEYS = (ENABLED, SHADOW, MIN_THINKING_TOKENS, PATIENCE, THRESHOLD, CONTRACT)
_OVERRIDES = (MIN_THINKING_TOKENS, PATIENCE, THRESHOLD)

MAX_CONTRACT = 65_536
"""Longest contract that a request may bring, in characters."""
_MOST_TOKENS = 2**24
"""Counters are exact below this (`ace_learn.exit.state`)."""
_FINITE = 1e300
"""Larger numbers, infinities and NaN are refused by one comparison, which integers of any size pass through."""
_NAMED_POINTS = 3
_CACHED_CONTRACTS = 256


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is done for one request."""

    exits: bool
    """Whether the exit rule runs; where not, the request costs nothing."""
    shadow: bool
    """The rule runs and records, and forces nothing."""
    policy: ExitPolicy
    """The server's policy with the request's overrides; `never` where the server has none."""
    certified: bool
    """Whether the certificate of the server's policy is about this request's rule and, where known, its sampling."""
    contract: Contract | None
    """Ends the request where the answer is complete."""


@runtime_checkable
class SamplingLike(Protocol):
    """The part of vLLM's `SamplingParams` that a certificate is about."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float


def sampling_of(params: SamplingLike) -> dict[str, JSON]:
    """A request's sampling, spelled as in a certificate; what no certificate knows is there where it acts."""
    found: dict[str, JSON] = {
        "temperature": params.temperature,
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
    }
    neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    return found | {name: getattr(params, name) for name, value in neutral.items() if getattr(params, name) != value}


def read_options(
    extra_args: Mapping[str, object] | None,
    settings: Settings,
    policy: ExitPolicy | None,
    *,
    request_id: str,
    sampling: Mapping[str, JSON] | None = None,
) -> RequestOptions:
    """Reads a request's keys.

    Args:
        extra_args: The request's extra arguments; keys without the prefix `ace_` are others'.
        settings: Of the server.
        policy: Of the server's head; None without one.
        request_id: Decides whether a `shadow_fraction` takes the request.
        sampling: Of the request (`sampling_of`), which a certificate must name; None: not compared.

    Raises:
        ValueError: An unknown key, or a value that is ill-typed, out of range or would be ignored; says what to send.
    """
    values = {key: cast(JSON, value) for key, value in (extra_args or {}).items() if key.startswith(PREFIX)}
    for key in values:
        if key not in KEYS:
            raise ValueError(_unknown(key))
    exits = _flag(values, ENABLED, default=settings.head is not None and settings.exits == "always")
    shadow = _flag(values, SHADOW, default=False)
    contract = _contract(values[CONTRACT], settings) if CONTRACT in values else None
    if exits and policy is None:
        raise ValueError(f"{ENABLED}: this server has no head folder, so it ends no thinking; leave {ENABLED} out")
    if not exits:
        _refuse_ignored(values, shadow=shadow)
    if not exits or policy is None:
        return RequestOptions(exits=False, shadow=False, policy=ExitPolicy.never(), certified=False, contract=contract)
    overridden = _overridden(policy, values)
    return RequestOptions(
        exits=True,
        shadow=shadow or _server_shadows(settings, request_id),
        policy=overridden,
        certified=overridden == policy and _names_sampling(policy, sampling),
        contract=contract,
    )


def _refuse_ignored(values: Mapping[str, JSON], *, shadow: bool) -> None:
    unread = [key for key in _OVERRIDES if key in values] + [SHADOW] * shadow
    if unread:
        raise ValueError(f"{unread[0]} is not read without exits; send {ENABLED}: true as well, or leave it out")


def _overridden(policy: ExitPolicy, values: Mapping[str, JSON]) -> ExitPolicy:
    """The policy with the request's overrides; without its certificate where they change anything."""
    asked = [key for key in _OVERRIDES if key in values]
    if asked and policy.predicate == "never":
        raise ValueError(f"{asked[0]} is not read: the policy of this server's head is 'never'; leave it out")
    changed = policy
    if MIN_THINKING_TOKENS in values:
        least = _count(values, MIN_THINKING_TOKENS, policy.min_thinking_tokens)
        changed = replace(changed, min_thinking_tokens=least)
    if PATIENCE in values:
        changed = replace(changed, patience=_count(values, PATIENCE, policy.patience))
    if THRESHOLD in values:
        changed = _at(changed, _point(values[THRESHOLD], policy))
    return policy if changed == policy else replace(changed, certificate=None)


def _at(policy: ExitPolicy, point: dict[str, float]) -> ExitPolicy:
    if policy.score is not None:
        return replace(policy, score=replace(policy.score, threshold=point["score"]))
    return replace(policy, thresholds=point)


def _point(value: JSON, policy: ExitPolicy) -> dict[str, float]:
    """The thresholds that a request asks for: a point of the certified set, or any where nothing is certified."""
    names = ("score",) if policy.score is not None else tuple(policy.thresholds)
    asked = _thresholds(value, names)
    if policy.certificate is None:
        _check_range(asked)
        return asked
    points = _certified_points(policy.certificate, names)
    ordered = sorted(points, key=lambda point: _distance(point, asked))
    if not ordered or not all(math.isclose(ordered[0][name], asked[name], rel_tol=1e-9) for name in names):
        allowed = "; ".join(_spell(point) for point in ordered[:_NAMED_POINTS])
        raise ValueError(
            f"{THRESHOLD} {_spell(asked)} is none of the {len(points)} certified points of this server's policy; the "
            f"nearest are: {allowed or 'none'}"
        )
    return ordered[0]


def _thresholds(value: JSON, names: tuple[str, ...]) -> dict[str, float]:
    """A number, or an object of signal: number as JSON text, since `vllm_xargs` is flat."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _loads(value, THRESHOLD)
    if len(names) == 1 and not isinstance(value, dict):
        value = {names[0]: value}
    if not isinstance(value, dict) or set(value) != set(names):
        example = json.dumps(dict.fromkeys(names, 0.5))
        wanted = f"as the text {example}" if len(names) > 1 else "as a number"
        raise ValueError(f"{THRESHOLD} must give {', '.join(names)} {wanted}, not {_short(value)}")
    found = {}
    for name in names:  # in the policy's order, so that equal policies are equal objects
        number = value[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not -_FINITE < number < _FINITE:
            raise ValueError(f"{THRESHOLD} must be a finite number, not {_short(number)}")
        found[name] = float(number)
    return found


def _check_range(point: Mapping[str, float]) -> None:
    for name, bound in point.items():
        if name not in ("score", *LEARNED):
            continue  # a derived signal may have any range
        most = math.inf if name == "remaining" else 1.0
        if not 0.0 <= bound <= most:
            raise ValueError(f"{THRESHOLD} of {name} must be from 0 to {most:g}, not {bound:g}")


def _certified_points(certificate: dict[str, JSON], names: tuple[str, ...]) -> list[dict[str, float]]:
    fields = JsonFields.of(certificate, where="certificate")
    grid = fields.items("grid")
    points = [JsonFields.of(grid[index], where="certificate grid") for index in fields.integers("certified")]
    return [{name: point.number(name) for name in names} for point in points]


def _distance(point: Mapping[str, float], asked: Mapping[str, float]) -> float:
    """How far apart two points are, each threshold on a scale of its own."""
    return sum(abs(point[name] - asked[name]) / (abs(point[name]) + abs(asked[name]) or 1.0) for name in asked)


def _contract(value: JSON, settings: Settings) -> Contract:
    """A contract of the server's table by its name, or one that the request brings as JSON text."""
    if isinstance(value, str) and value in settings.contracts:
        return _built(json.dumps(settings.contracts[value]))
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        known = ", ".join(settings.contracts) or "none"
        raise ValueError(
            f"{CONTRACT} {_short(value)} is no name of the server's table (known: {known}) and no spec as JSON text, "
            'such as {"kind": "integer"}'
        )
    if not isinstance(value, str | dict):
        raise ValueError(f"{CONTRACT} must be a name of the server's table or a spec as JSON text, not {_short(value)}")
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MAX_CONTRACT:
            raise ValueError(f"it has {len(text)} characters; at most {MAX_CONTRACT} are allowed")
        return _built(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{CONTRACT}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{CONTRACT} is nested too deeply") from error


@lru_cache(maxsize=_CACHED_CONTRACTS)
def _built(spec: str) -> Contract:
    return Contract.from_spec(spec)


def _flag(values: Mapping[str, JSON], key: str, *, default: bool) -> bool:
    """A boolean; pydantic may turn the JSON value true into 1, since `vllm_xargs` knows no booleans."""
    value = values.get(key, default)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{key} must be true or false, not {_short(value)}")


def _count(values: Mapping[str, JSON], key: str, least: int) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number, not {_short(value)}")
    if not least <= value < _MOST_TOKENS:
        raise ValueError(
            f"{key} must be from {least}, the policy's own, to below {_MOST_TOKENS}, not {_short(value)}: a request "
            "may only make the server's rule more careful"
        )
    return value


def _names_sampling(policy: ExitPolicy, sampling: Mapping[str, JSON] | None) -> bool:
    """Whether there is a certificate, and it was made for this sampling."""
    if policy.certificate is None:
        return False
    certified = policy.certificate.get("sampling")
    if sampling is None or not isinstance(certified, dict):
        return sampling is None
    used = {name: value for name, value in certified.items() if name != "seed"}
    if used.get("temperature") == 0 and sampling.get("temperature") == 0:
        return set(sampling) <= {"temperature", "top_k", "top_p", "min_p"}  # greedy: truncation changes nothing
    return dict(sampling) == used


def _server_shadows(settings: Settings, request_id: str) -> bool:
    """Whether the server shadows a request that does not ask for it; the same in every process."""
    if settings.shadow:
        return not settings.runtime_switch  # with the switch, the request brings what it said (`validation`)
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < settings.shadow_fraction * 2**64


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown request key {_short(key)}{hint} (known: {', '.join(KEYS)})"


def _loads(text: str, key: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key} is no JSON: {_short(text)}") from error
    return value


def _short(value: JSON) -> str:
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"an integer of {value.bit_length()} bits"  # Python may refuse to spell it out
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _spell(point: Mapping[str, float]) -> str:
    return repr(next(iter(point.values()))) if len(point) == 1 else json.dumps(dict(point))
