"""A config as the recipe that makes it."""

import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import yaml

from ace_learn.json_type import JSON

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN_WORDS = re.compile(r"[A-Za-z_/][\w ./-]*[\w/]|[A-Za-z_]")


class _Dumper(yaml.SafeDumper):
    """Quotes every string that some YAML reader might take for something else (1e3, on, [a])."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _PLAIN_WORDS.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_config(config: "DataclassInstance") -> str:
    """The YAML recipe that makes a config again, every value spelled out.

    Args:
        config: A tree of dataclasses whose leaves are YAML scalars, paths, tuples, lists and dictionaries.

    Returns:
        YAML text; `python -m ace_learn.<command> FILE` with this text reads the same config.
    """
    return yaml.dump(config_json(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def config_json(config: "DataclassInstance") -> dict[str, JSON]:
    """A config as a JSON object: paths as texts, tuples as lists."""
    return {name: _plain(value) for name, value in asdict(config).items()}


def same_config(config: "DataclassInstance", recipe: Path, *, ignoring: Collection[str] = ()) -> bool:
    """Whether a recipe that `dump_config` wrote is that of this config.

    Args:
        config: The config.
        recipe: The YAML file.
        ignoring: Fields that may differ.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        found = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False
    if not isinstance(found, dict):
        return False
    wanted = yaml.safe_load(dump_config(config))
    return all(
        name in found and name in wanted and found[name] == wanted[name]
        for name in {*found, *wanted}.difference(ignoring)
    )


def _plain(value: object) -> JSON:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    assert value is None or isinstance(value, str | int | float), f"{value!r} has no place in a config"
    return value
