"""A config as the recipe that makes it."""

import re
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING

import yaml

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
    return yaml.dump(_plain(asdict(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(value: object) -> object:
    """The value in terms of YAML's own types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value
