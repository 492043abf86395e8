"""What all commands share: recipes in, errors out.

A command is a frozen dataclass and a function of it. `run_command` reads the dataclass from a YAML recipe and from
flags; the docstrings of the fields are the help texts.
"""

import errno
import logging
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, make_dataclass
from pathlib import Path
from typing import NoReturn, TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, set_dumper, set_parsing_settings

from ace_learn.artifacts import dump_config

__all__ = ["build_parser", "parse_config", "read_choice", "run_command"]

Config = TypeVar("Config")

SHORT_FLAGS = {"--model": "--target.model"}
"""Short flags of every command whose config has the field, and none of the short name."""
USER_ERROR = 2
INTERRUPTED = 130
_NO_OBJECT = re.compile(
    r"Parser key \"(?P<key>[^\"]+)\":.*Expected a <class 'dict'>.*Given value: (?P<value>[\w-]+)\s*$", re.DOTALL
)
_MOST_NODES = 1_000_000
"""Largest recipe in YAML values."""
TRACEBACK_VARIABLE = "ACE_LEARN_TRACEBACK"
"""Set to 1 to see the traceback of an error instead of one line."""


def run_command(
    config_class: type[Config],
    function: Callable[[Config], object],
    *,
    description: str,
    argv: Sequence[str] | None = None,
    defaults: Mapping[str, object] | None = None,
    resumes: bool = True,
) -> None:
    """Runs one command: `python -m ace_learn.<command> [RECIPE.yaml] [--flag value ...]`.

    A flag beats the recipe, the recipe beats the default. A wrong recipe or flag, and a ValueError or OSError of the
    function, end the process with status 2 and one line on stderr; Ctrl-C ends it with status 130.

    Args:
        config_class: The frozen dataclass that the recipe fills; it may nest other dataclasses.
        function: The work; what it returns is dropped.
        description: What the command does, for `--help`.
        argv: The arguments; those of the process if None.
        defaults: Defaults of this command that differ from the dataclass', as {"field.subfield": value}.
        resumes: Whether a run that was interrupted goes on when the command is given again.

    Raises:
        SystemExit: With the status above, or after `--help` and `--print_config`.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its notes on devices and products
    parser = build_parser(config_class, description=description, defaults=defaults)
    try:
        function(parse_config(parser, config_class, sys.argv[1:] if argv is None else argv))
    except ArgumentError as error:
        _fail(f"{_plain(str(error.message))} (see {parser.prog} --help)", error)
    except (ValueError, OSError) as error:
        _fail(_explain(error), error)
    except RecursionError as error:
        _fail("the input is nested too deeply, or refers to itself", error)
    except OverflowError as error:
        _fail(f"a number is too large ({error}); choose a smaller one", error)
    except MemoryError as error:
        _fail("there is not enough memory; choose smaller sizes", error)
    except KeyboardInterrupt:
        outcome = "run the same command again to resume" if resumes else "nothing was kept"
        print(f"interrupted; {outcome}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def build_parser(
    config_class: type[Config], *, description: str, defaults: Mapping[str, object] | None = None
) -> ArgumentParser:
    """The parser that reads a config class from recipes and flags.

    Raises:
        TypeError: The types of the class cannot be read, or would be read wrongly.
    """
    # A recipe may come with a downloaded artifact: nothing that it names is imported but the parts of its own config.
    set_parsing_settings(
        docstring_parse_attribute_docstrings=True,
        instantiate_subclass_spec_in_any=False,
        import_path_denylist=["*"],
        import_path_allowlist=[f"{part.__module__}.{part.__qualname__}" for part in _config_classes(config_class)],
    )
    set_dumper("yaml", _to_yaml)
    parser = ArgumentParser(
        prog=_program(),
        usage="%(prog)s [RECIPE.yaml] [--flag value ...]",
        description=description,
        epilog=" ".join(f"{short} is short for {long}." for short, long in _short_flags(config_class).items()),
        exit_on_error=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        metavar="RECIPE.yaml",
        help="A YAML recipe; the same as giving it first. Flags beat what it says.",
    )
    parser.add_class_arguments(config_class)
    parser.set_defaults(dict(defaults or {}))
    return parser


def parse_config(parser: ArgumentParser, config_class: type[Config], argv: Sequence[str]) -> Config:
    """Reads a config from command-line arguments.

    Args:
        parser: Made by `build_parser` for the same class.
        config_class: The dataclass to make.
        argv: An optional recipe, then flags.

    Raises:
        ArgumentError: A key or flag is unknown, has a wrong value, or is missing.
        ValueError: The config class refuses a combination of values.
    """
    arguments = _recipes_first([_lengthen(argument, _short_flags(config_class)) for argument in argv])
    for argument in arguments:
        _refuse_ambiguous_yaml(argument)
    parsed = parser.parse_args(arguments)
    values = parser.instantiate(parsed)
    assert isinstance(values, Namespace)
    return config_class(**{key: value for key, value in vars(values).items() if key != "config"})


def read_choice(argv: Sequence[str], field: str, *, default: str) -> str:
    """A text field of the config that the arguments describe, read before it is known which config that is.

    Args:
        argv: An optional recipe, then flags, as `parse_config` takes them.
        field: The field, of the outermost object.
        default: What it is where neither flag nor recipe has it, or the recipe cannot be read: the parser says why.
    """
    arguments = _recipes_first(list(argv))
    found = default
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if name == f"--{field}":
            return value
        if name == "--config" and Path(value).is_file():
            with suppress(yaml.YAMLError, RecursionError, UnicodeDecodeError):
                recipe = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
                found = str(recipe.get(field, found)) if isinstance(recipe, dict) else found
    return found


def _refuse_ambiguous_yaml(argument: str) -> None:
    """Refuses what YAML readers take without a word, in a recipe or in a flag's value.

    That is YAML that contains itself, or so much of itself that the parser would never come back, and a key that is
    there twice, of which the parser would drop the first.
    """
    name = argument.partition("=")[2] if argument.startswith("--") else argument
    is_recipe = name.endswith((".yaml", ".yml")) and Path(name).is_file()
    if not is_recipe and not name.startswith(("{", "[")):
        return
    try:
        root = yaml.compose(Path(name).read_text(encoding="utf-8") if is_recipe else name, Loader=yaml.SafeLoader)
        wrong = None if root is None else _ambiguity(root, above=(), seen=set())
        if wrong is None and root is not None and _written_out(root, {}) > _MOST_NODES:
            wrong = f"it is larger than {_MOST_NODES:,} values with its aliases (&name, *name) written out"
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError):
        return  # the parser says what is wrong with it
    if wrong is not None:
        raise ValueError(f"{name if is_recipe else name[:60]}: {wrong}")


def _ambiguity(node: yaml.Node, *, above: tuple[int, ...], seen: set[int]) -> str | None:
    """What is ambiguous in a YAML tree; None if nothing is."""
    if id(node) in above:
        return "it refers to itself by a YAML alias (&name, *name); write the value out"
    if id(node) in seen:
        return None
    seen.add(id(node))
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, (key, _) in enumerate(node.value):
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys[:index]:
                return (
                    f"the key {key.value!r} is there twice, again in line {key.start_mark.line + 1}; keep one of them"
                )
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    found = (_ambiguity(child, above=(*above, id(node)), seen=seen) for child in children)
    return next((wrong for wrong in found if wrong is not None), None)


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes of a YAML tree without cycles, with every alias written out."""
    if id(node) not in known:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = 1 + sum(_written_out(child, known) for child in children)
    return known[id(node)]


def _recipes_first(argv: Sequence[str]) -> list[str]:
    """Moves recipes before the flags, since jsonargparse lets the later of the two win."""
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    elif len(arguments) > 1 and _is_recipe(arguments[-1]) and _is_whole_flag(arguments[:-1]):
        arguments = ["--config", arguments[-1], *arguments[:-1]]
    recipes: list[str] = []
    flags: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        if argument == "--config" and arguments:
            recipes += [argument, arguments.pop(0)]
        elif argument.startswith("--config="):
            recipes.append(argument)
        else:
            flags.append(argument)
    return recipes + flags


def _is_recipe(argument: str) -> bool:
    return argument.endswith((".yaml", ".yml")) and not argument.startswith("-")


def _is_whole_flag(arguments: Sequence[str]) -> bool:
    """Whether the last of the arguments ends a flag and its value, so that what follows is no value of it."""
    *before, last = arguments
    return "=" in last if last.startswith("--") else bool(before) and before[-1].startswith("--")


def _short_flags(config_class: type[object]) -> dict[str, str]:
    return {
        short: long
        for short, long in SHORT_FLAGS.items()
        if _has_field(config_class, long[2:].split(".")) and not _has_field(config_class, [short[2:]])
    }


def _has_field(config_class: object, path: Sequence[str]) -> bool:
    if not path:
        return True
    if not (isinstance(config_class, type) and is_dataclass(config_class)):
        return False
    hints = get_type_hints(config_class)
    return path[0] in hints and _has_field(hints[path[0]], path[1:])


def _lengthen(argument: str, short_flags: Mapping[str, str]) -> str:
    """A flag as the parser knows it: --base-url and --base_url are the same, --model may be short for another."""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        field, dot, below = name[2:].partition(".")  # a key below a field may hold dashes of its own
        name = f"--{field.replace('-', '_')}{dot}{below}"
    return f"{short_flags.get(name, name)}{equals}{value}"


def _config_classes(config_class: type[object]) -> list[type[object]]:
    """The dataclasses that a config consists of, itself included.

    Raises:
        TypeError: jsonargparse would quietly read something else: a field's type is imported for type checkers only, so
            that all fields would be read untyped; or a container holds `object`, whose strings would be read as YAML
            once more ("[A-D]" becomes a list).
    """
    try:
        hints = get_type_hints(config_class)
    except NameError as error:
        raise TypeError(f"{config_class.__name__}: {error}; import the types of its fields at run time") from error
    classes = [config_class]
    for name, hint in hints.items():
        for part in _parts(hint):
            if part is object:
                raise TypeError(f"{config_class.__name__}.{name}: use ace_learn.tasks.JsonObject for free-form values")
            if isinstance(part, type) and is_dataclass(part):
                classes += _config_classes(part)
    return classes


def _parts(hint: object) -> list[object]:
    return [hint, *(part for argument in get_args(hint) for part in _parts(argument))]


def _plain(message: str) -> str:
    """Words for what jsonargparse says of a bare text where an object belongs, such as `--contract integer`."""
    found = _NO_OBJECT.match(message)
    if found is None:
        return message
    return f"{found['key']} must be an object, such as {{kind: {found['value']}}}, not {found['value']!r}"


def _explain(error: ValueError | OSError) -> str:
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; free some space, or choose another folder, and run the same command again"
    return f"{where}{error.strerror or error}"


def _fail(message: str, error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        raise error
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(USER_ERROR)


def _to_yaml(values: dict[str, object]) -> str:
    """Text for --print_config; jsonargparse's own leaves the text "1e3" unquoted, which reads as a number."""
    return dump_config(make_dataclass("Printed", values)(**values))


def _program() -> str:
    """How the user started the process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "python -m ace_learn" if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
