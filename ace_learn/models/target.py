"""Loading a target model and running it row by row with its hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.generic import ModelOutput

from ace_learn.models.attention import GROUPED_ATTENTION
from ace_learn.models.cache import SlotCache
from ace_learn.models.fingerprint import fingerprint
from ace_learn.models.identity import TargetIdentity
from ace_learn.reasoner import weights_path
from ace_learn.thinking import BoundaryTables, ThinkMarkers

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Known values of `target.dtype`."""

EMBEDDED = "ace_learn/reasoner"
"""Model name of the embedded reasoner."""

OUTPUT = -1
"""As a tapped layer: what the output layer reads, of every column."""

_KEPT = -2
"""Where the input of the output layer is kept, of the columns that it reads."""

_InputHook = Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]
_Output = Tensor | Sequence[Tensor] | ModelOutput
_OutputHook = Callable[[nn.Module, tuple[Tensor, ...], _Output], None]


@dataclass(frozen=True, kw_only=True)
class ThinkConfig:
    """How the target marks its thinking."""

    start: str = "<think>"
    """Text of the think start."""
    end: str = "</think>"
    """Text of the think end; the runtime forces exactly its tokens."""
    multi_token: bool = False
    """Accept markers that the tokenizer has no single token for."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which model is the target, and how to load it."""

    model: str
    """Folder or hub id of a causal language model; `ace_learn/reasoner` is the one in this package."""
    dtype: str = "auto"
    """`auto` (as saved), `float32`, `bfloat16` or `float16`."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`, ..."""
    think: ThinkConfig = ThinkConfig()
    """Think markers."""
    revision: str | None = None
    """Hub revision; None: the default branch."""


class RowOutputs(NamedTuple):
    """What the target says after each input token."""

    logits: Float[Tensor, "B Q V"]
    last: Float[Tensor, "B Q H"]
    """Input of the output layer (after the final norm, where the family norms first)."""
    aux: Float[Tensor, "B Q A"]
    """The hidden states that enter the tapped layers, concatenated; A = 0 without taps."""


class Target:
    """A causal language model with its tokenizer, think markers and identity."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, markers: ThinkMarkers, *, name: str
    ) -> None:
        """Wraps a loaded model.

        Raises:
            ValueError: The architecture cannot run on the slot cache, naming why.
        """
        text_config = model.config.get_text_config()
        _check_layers(model, text_config, name)
        model.set_attn_implementation(GROUPED_ATTENTION)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.markers = markers
        self.output_layer = model.get_output_embeddings()
        if not isinstance(self.output_layer, nn.Linear):
            raise ValueError(f"{name}: the model has no linear output layer; load a causal language model")
        self.vocab_size = self.output_layer.out_features
        if max(*markers.start, *markers.end) >= self.vocab_size:
            raise ValueError(
                f"{name}: the think markers {markers} are beyond the model's {self.vocab_size} embeddings; resize them"
            )
        self.layers = _decoder_layers(model, text_config.num_hidden_layers, name)
        self.context_length = int(getattr(text_config, "max_position_embeddings", 1 << 30))
        self.tables = BoundaryTables.from_tokenizer(tokenizer, self.vocab_size)
        self.identity = TargetIdentity(
            name=name,
            fingerprint=fingerprint(model),
            hidden_size=int(text_config.hidden_size),
            num_layers=int(text_config.num_hidden_layers),
            vocab_size=self.vocab_size,
            markers=markers,
            tables_sha256=self.tables.sha256,
        )

    @property
    def device(self) -> torch.device:
        """Where the inputs go."""
        device: torch.device = self.output_layer.weight.device
        return device

    @property
    def stop_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the generation config and the tokenizer."""
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = [*(configured if isinstance(configured, list) else [configured]), self.tokenizer.eos_token_id]
        return frozenset(int(i) for i in ids if i is not None)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of output tokens, special tokens included."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def default_aux_layers(self) -> tuple[int, ...]:
        """The layers that EAGLE-3 taps by default, (2, n // 2, n - 3); the last three where those collide.

        As in vLLM, layer i stands for the hidden states that enter decoder layer i.
        """
        n = len(self.layers)
        tapped = (2, n // 2, n - 3)
        return tapped if 2 < n // 2 < n - 3 else tuple(range(max(0, n - 3), n))

    def new_cache(self, num_slots: int) -> SlotCache:
        """An empty cache for `num_slots` requests."""
        return SlotCache(len(self.layers), num_slots)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "B Q"],
        positions: Int[Tensor, "B Q"],
        cache: SlotCache,
        *,
        longest: int,
        first_slot: int = 0,
        aux_layers: Sequence[int] = (),
        last_only: bool = False,
    ) -> RowOutputs:
        """Runs the active rows of a batch one step further.

        Args:
            tokens: Input tokens; row i belongs to slot `first_slot` + i of the cache.
            positions: Sequence position of each token.
            cache: Written at `positions`.
            longest: One more than the largest position.
            first_slot: Cache slot of the first row.
            aux_layers: Decoder layers whose inputs are returned; their number stands for what leaves the last one, and
                `OUTPUT` for what the output layer reads.
            last_only: Compute the output layer for the last column alone (Q = 1 in `logits` and `last`).
        """
        mask = cache.begin(positions, longest, first_slot)
        with self._tapped(aux_layers) as taps:
            output = self.model(
                input_ids=tokens,
                position_ids=positions.clamp_max(self.context_length - 1),  # padding may stand beyond the context
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=int(last_only),
            )
        aux = [taps[layer] for layer in aux_layers]
        last = taps[_KEPT]
        return RowOutputs(logits=output.logits.float(), last=last, aux=torch.cat(aux, dim=-1) if aux else last[..., :0])

    @contextmanager
    def _tapped(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        taps: dict[int, Tensor] = {}

        def keep_input(index: int) -> _InputHook:
            def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                taps[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        def keep_output(index: int) -> _OutputHook:
            def hook(
                module: nn.Module, args: tuple[Tensor, ...], output: Tensor | Sequence[Tensor] | ModelOutput
            ) -> None:
                taps[index] = output if isinstance(output, Tensor) else output[0]

            return hook

        outputs = {OUTPUT: self.model.base_model, len(self.layers): self.layers[-1]}
        inputs = [
            *((layer, self.layers[layer]) for layer in layers if layer not in outputs),
            (_KEPT, self.output_layer),
        ]
        handles = [module.register_forward_pre_hook(keep_input(i), with_kwargs=True) for i, module in inputs]
        handles += [outputs[i].register_forward_hook(keep_output(i)) for i in layers if i in outputs]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


def select_layers(aux: Float[Tensor, "B Q A"], tapped: Sequence[int], wanted: Sequence[int]) -> Float[Tensor, "B Q W"]:
    """The columns of some of the tapped layers, in the order wanted."""
    if tuple(tapped) == tuple(wanted):
        return aux
    if not wanted:
        return aux[..., :0]
    chunks = dict(zip(tapped, aux.chunk(len(tapped), dim=-1), strict=True))
    return torch.cat([chunks[layer] for layer in wanted], dim=-1)


def _check_layers(model: PreTrainedModel, text_config: PreTrainedConfig, name: str) -> None:
    """Refuses layers that the slot cache cannot hold."""
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if not kinds:
        window = getattr(text_config, "sliding_window", None)
        kinds = {"recurrent" if model._is_stateful else "sliding_attention" if window else "full_attention"}
    if kinds == {"full_attention"}:
        return
    why = ""
    if kinds & {"linear_attention", "recurrent"}:
        why = ": a rejected draft's tokens cannot be taken back out of a recurrent state"
    raise ValueError(
        f"{name}: its layers are {', '.join(sorted(kinds))}, and the HF reference engine runs full_attention alone"
        f"{why}. Use a model with full attention in every layer, or serve it in vLLM"
    )


def _decoder_layers(model: PreTrainedModel, count: int, name: str) -> nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(f"{name}: found no list of its {count} decoder layers; this architecture is not supported")
    return lists[0]


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; name auto, cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; use --target.device cpu or auto")
    return name


def load_target(config: TargetConfig) -> Target:
    """Loads the target that a recipe names.

    Raises:
        ValueError: There is no such model, it has no think markers, or its architecture is not supported.
    """
    device = _device(config.device)
    if config.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {config.dtype!r}; known: {', '.join(DTYPES)}")
    source = _source(config.model)
    with _loading(config.model):
        tokenizer = AutoTokenizer.from_pretrained(source, revision=config.revision)
        markers = ThinkMarkers.from_tokenizer(
            tokenizer, start=config.think.start, end=config.think.end, multi_token=config.think.multi_token
        )
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=config.dtype, revision=config.revision, device_map={"": device}
        )
    return Target(model, tokenizer, markers, name=config.model)


def load_draft_model(name: str, target: Target) -> Target:
    """Loads a draft model for a target, onto its device and in its dtype.

    The output layers may be padded to different sizes, as long as the tokenizers agree.

    Args:
        name: Folder or hub id of a causal language model with the target's tokenizer.
        target: The model that verifies.

    Raises:
        ValueError: There is no such model, its tokenizer is another one, or its architecture is not supported.
    """
    source = _source(name)
    with _loading(name):
        tokenizer = AutoTokenizer.from_pretrained(source)
        check_same_tokens(tokenizer, name, target)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=target.output_layer.weight.dtype, device_map={"": target.device}
        )
    return Target(model, tokenizer, target.markers, name=name)


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, name: str, target: Target) -> None:
    """Refuses a draft model whose token ids mean something else; the think markers are among them."""
    theirs, ours = tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if theirs == ours:
        return
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    shown = ", ".join(f"{token!r} is {theirs.get(token)} there and {ours.get(token)} here" for token in differing[:3])
    raise ValueError(
        f"the draft model {name!r} ({len(theirs)} tokens) and the target {target.identity.name!r} ({len(ours)} tokens) "
        f"have different tokenizers: {len(differing)} tokens differ, such as {shown}; use a draft model of the "
        "target's own family"
    )


def _source(name: str) -> str:
    source = str(weights_path()) if name == EMBEDDED else name
    if Path(source).exists() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"{source} holds no config.json; name a folder saved by transformers, or a hub id")
    return source


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Says which model could not be loaded, whatever went wrong in its files."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"cannot load the model {name!r}: {error}. Name a complete folder, or a hub id that this machine can reach."
        ) from error
