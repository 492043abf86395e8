"""Tiny random models that vLLM serves: a target, draft models for it, an EAGLE-3 head, a MiMo with its own drafts.

A random target takes any draft: a copy is always accepted, a copy with noise on its weights sometimes. A random EAGLE-3
head or prediction layer would never be: so theirs are linear probes, fitted to what the target says on some prompts of
its own, with an attention and an MLP that add nothing. They guess one token well, and the ones behind it badly.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ace_learn.models.target import Target
from ace_learn.testing.vllm.mimo import MiMoConfig, MiMoForCausalLM, register

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 192, 4, 2, 32, 4
AUX_LAYERS = (1, 2, 3)
"""What the EAGLE-3 head taps; vLLM's own choice has them collide in so few layers."""
CONTEXT = 512
_NOISE = 0.008
"""Standard deviation of what is added to the noisy draft's weights; about half of its first drafts are accepted."""
_SPREAD = 0.12
_RARE = 2.0
"""Logit of special tokens in the law's target, with the sign changed; those of the others are around zero."""
_EAGER = 1.5
"""What the breaking draft model adds to the logit of a paragraph end."""
_RIDGE = 1e-2
_PROBE_PROMPTS, _PROBE_TOKENS = 48, 96

SPECIAL = ("<unk>", "<eos>", "<user>", "<think>", "</think>")
UNKNOWN, EOS, USER, THINK, END_THINK = range(len(SPECIAL))
BREAKS = ("\n\n", ".\n\n", " so\n\n", " ok\n\n", "!\n\n", "?\n\n", " yes\n\n", " no\n\n", "\n")
WORDS = (
    *SPECIAL, *BREAKS, " wait", " then", " the", " sum", " is", ".", ",", "\\boxed{7}", "\\boxed{8}", "\\boxed{9}",
    "{", "}", '"', ":", *"0123456789?", *"abcdefghijklmnopqrstuvwxyz",
)  # fmt: skip
LAW_WORDS = (*SPECIAL, "\n\n", ".\n\n", "a", "b", "c")
TEMPLATE = (
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)


class TinyModels(NamedTuple):
    """Folders of models that go together; all have the same vocabulary."""

    target: Path
    """Qwen3, 4 layers; it never ends its thinking or its output by itself."""
    draft: Path
    """A copy of the target."""
    noisy: Path
    """A copy of the target with noise on its weights."""
    eagle3: Path
    """An EAGLE-3 head for the target; it drafts a part of the vocabulary."""
    mimo: Path
    """Another target, with a multi-token-prediction layer (`method: mtp`)."""


class LawModels(NamedTuple):
    """A target with so few words that laws of its outputs can be counted, and draft models for it."""

    target: Path
    noisy: Path
    breaking: Path
    """Like `noisy`, but it mostly drafts ends of paragraphs, where exits are."""


def write_tiny_models(folder: Path) -> TinyModels:
    """Writes all models into sub-folders; takes a few seconds and always gives the same weights.

    Args:
        folder: Where; it is made if need be.
    """
    models = TinyModels(*(folder / name for name in TinyModels._fields))
    tokenizer = word_tokenizer(WORDS)
    target = _quiet(_seeded_qwen3(len(WORDS), seed=1), breaks=1.25)
    _save(models.target, target, tokenizer)
    _save(models.draft, target, tokenizer)
    states = _states(target, tiny_prompts(_PROBE_PROMPTS, seed=17))
    _write_eagle3(models.eagle3, states)
    _save(models.noisy, _noisy(target, _NOISE), tokenizer)
    _write_mimo(models.mimo, tokenizer)
    return models


def write_law_models(folder: Path, *, sharpness: float = 1.5) -> LawModels:
    """Writes the target and the draft model for tests of distributions; like `write_tiny_models`.

    Args:
        folder: Where; it is made if need be.
        sharpness: Factor on the logits; a sharper law has fewer common outcomes, and greedy drafts are accepted more.
    """
    models = LawModels(*(folder / name for name in LawModels._fields))
    tokenizer = word_tokenizer(LAW_WORDS)
    target = _seeded_qwen3(len(LAW_WORDS), seed=3, spread=0.05)
    with torch.no_grad():
        target.lm_head.weight.mul_(sharpness)
        mean = _states(target, tiny_prompts(_PROBE_PROMPTS, words=LAW_WORDS)).hidden[:, :, -1].mean((0, 1))
        target.lm_head.weight[: len(SPECIAL)] = -_RARE * mean / mean.square().sum()
    _save(models.target, target, tokenizer)
    noisy = _noisy(target, 0.01)
    _save(models.noisy, noisy, tokenizer)
    with torch.no_grad():
        noisy.lm_head.weight[LAW_WORDS.index("\n\n")] += _EAGER * sharpness * mean / mean.square().sum()
    _save(models.breaking, noisy, tokenizer)
    return models


def write_noisy_copy(folder: Path, target: Target, noise: float) -> Path:
    """Writes a copy of a target with noise on its matrices, as a draft model for it; returns the folder.

    Args:
        folder: Where; it must not exist.
        target: Its weights are left as they are.
        noise: Standard deviation of what is added, as a share of each matrix' own.
    """
    noisy = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.ndim == 2:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    _save(folder, noisy, target.tokenizer)
    return folder


def tiny_prompts(
    count: int, *, seed: int = 0, longest: int = 12, words: Sequence[str] = WORDS, think: bool = True
) -> list[list[int]]:
    """Random prompts that end in an open think block.

    Args:
        count: How many.
        seed: The same seed gives the same prompts.
        longest: Most tokens; the fewest are 3.
        words: The vocabulary.
        think: Off: the think block is closed again, as a template does with thinking disabled.
    """
    rng = random.Random(seed)
    first = len(SPECIAL)
    end = [THINK] if think else [THINK, END_THINK]
    return [
        [USER, *(rng.randrange(first, len(words)) for _ in range(rng.randint(1, longest - 2))), *end]
        for _ in range(count)
    ]


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with these words, `SPECIAL` first; its chat template opens the think block."""
    tokenizer = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    by_length = sorted(words, key=len, reverse=True)
    tokenizer.pre_tokenizer = Split(Regex("|".join(map(re.escape, by_length))), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    fast.chat_template = TEMPLATE
    return fast


def _sizes(vocab_size: int, spread: float) -> dict[str, int | float | bool | None]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "initializer_range": spread,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
    }


def _seeded_qwen3(vocab_size: int, *, seed: int, spread: float = _SPREAD) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config.from_dict({**_sizes(vocab_size, spread), "head_dim": HEAD_DIM})
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).eval()
    return model


def _quiet(model: Qwen3ForCausalLM | MiMoForCausalLM, *, breaks: float) -> PreTrainedModel:
    """Makes special tokens all but impossible, so that only exits end the thinking, and ends of paragraphs likelier.

    Args:
        model: Changed in place.
        breaks: Factor on the logits of paragraph ends.
    """
    first = len(SPECIAL)
    with torch.no_grad():
        model.lm_head.weight[:first] = 0
        model.lm_head.weight[first : first + len(BREAKS)] *= breaks
    return model


def _noisy(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return model


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name not in tied}
    _save_weights(folder, weights)
    tokenizer.save_pretrained(folder)


def _save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})


class _States(NamedTuple):
    """Greedy continuations, and what the target holds there."""

    tokens: Int[Tensor, "B T"]
    hidden: Float[Tensor, "B T L H"]
    """What enters each layer, and last what enters the output layer."""


@torch.no_grad()
def _states(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> _States:
    """Continues the prompts, cut to equal length so that they form a batch."""
    width = min(map(len, prompts))
    tokens = torch.tensor([list(prompt[-width:]) for prompt in prompts])
    output, cache = None, None
    for _ in range(_PROBE_TOKENS):
        output = model(tokens if cache is None else tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = torch.cat((tokens, output.logits[:, -1:].argmax(-1)), dim=1)
    hidden = model(tokens, output_hidden_states=True).hidden_states
    return _States(tokens, torch.stack(hidden, dim=2))


def _probe(features: Float[Tensor, "N F"], labels: Int[Tensor, " N"], num_labels: int) -> Float[Tensor, "V F"]:
    """Ridge regression of one-hot labels, without an intercept, which the layers have none for."""
    features = features.double()
    gram = features.T @ features / len(features) + _RIDGE * torch.eye(features.shape[1], dtype=torch.float64)
    moments = nn.functional.one_hot(labels, num_labels).double().T @ features / len(features)
    probe: Tensor = torch.linalg.solve(gram, moments.T).T.float()
    return probe


def _idle_layer(prefix: str, inputs: int) -> dict[str, Tensor]:
    """A decoder layer that adds nothing to its input; queries, keys and values still run."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return 0.05 * torch.randn(*shape, generator=generator)

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}.self_attn.q_proj.weight": drawn(queries, inputs),
        f"{prefix}.self_attn.k_proj.weight": drawn(keys, inputs),
        f"{prefix}.self_attn.v_proj.weight": drawn(keys, inputs),
        f"{prefix}.self_attn.o_proj.weight": torch.zeros(HIDDEN, queries),
        f"{prefix}.mlp.gate_proj.weight": drawn(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": drawn(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE),
    }


def _write_eagle3(folder: Path, states: _States) -> None:
    """The output layer reads the probe off the first dimensions of what `fc` makes of the tapped layers."""
    kept = torch.arange(len(SPECIAL), len(WORDS))
    aux = states.hidden[:, :-2, list(AUX_LAYERS)].flatten(0, 1).flatten(1)
    probe = _probe(aux, states.tokens[:, 2:].flatten(), len(WORDS))[kept]
    weights = {
        **_idle_layer("midlayer", 2 * HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": nn.functional.pad(probe, (0, 0, 0, HIDDEN - len(kept))),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.eye(len(kept), HIDDEN),
        "d2t": kept - torch.arange(len(kept)),
    }
    config = {
        **_sizes(len(WORDS), _SPREAD),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": HEAD_DIM,
        "draft_vocab_size": len(kept),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    folder.mkdir(parents=True)
    _save_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_mimo(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The prediction layer shares the target's output layer, so the probe is led there by its pseudo-inverse."""
    register()
    torch.manual_seed(5)
    model = MiMoForCausalLM(MiMoConfig.from_dict(_sizes(len(WORDS), _SPREAD)))
    _quiet(model, breaks=1.0)
    states = _states(model, tiny_prompts(_PROBE_PROMPTS, seed=18))
    embedded = model.get_input_embeddings()(states.tokens).detach()
    before = torch.cat((_normed(states.hidden[:, :-2, -1]), _normed(embedded[:, 1:-1])), dim=-1).flatten(0, 1)
    probe = _probe(before, states.tokens[:, 2:].flatten(), len(WORDS))
    first = len(SPECIAL)
    output = model.lm_head.weight.detach()[first:]
    layer = {**_idle_layer("layer", HIDDEN), "layer.input_proj.weight": torch.linalg.pinv(output) @ probe[first:]}
    own = {name.removeprefix("layer."): weight for name, weight in layer.items()}
    model.model.mtp_layers[0].load_state_dict(own, strict=False)  # biases and norms stay as they are made
    _save(folder, model, tokenizer)


def _normed(hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=1e-6)
