"""Tiny random targets of several architectures, with a tokenizer that is not the reasoner's.

The vocabulary is small, so that a randomly initialised model thinks, ends paragraphs, closes its thinking and boxes an
answer within a few dozen tokens when it is sampled at temperature 1.
"""

import re

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ace_learn.models.target import Target
from ace_learn.thinking import ThinkMarkers

WORDS = [
    "<unk>", "<eos>", "<user>", "<think>", "</think>", "\n\n", "\n", " ", ".\n\n", " so\n\n", " wait", " then", " the",
    " sum", " is", ".", ",", "\\boxed{7}", "\\boxed{8}", "\\boxed{9}", *"0123456789?", *"abcdefghijklmnopqrstuvwxyz",
]  # fmt: skip
OPENED_IN_PROMPT = (
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
OPENED_BY_MODEL = (
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
_ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
_SETTINGS = {
    "qwen3_next": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
}  # fmt: skip


def tiny_tokenizer(template=OPENED_IN_PROMPT, words=WORDS):
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_length = sorted(words, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, by_length))), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<think>", "</think>"]})
    fast.chat_template = template
    return fast


def tiny_model(architecture="qwen3", *, seed=0, spread=0.02, layers=4, words=WORDS, vocab_size=None, **settings):
    """A random model; a larger `spread` makes its greedy text varied and its sampled text peaked."""
    if architecture == "qwen3_next":
        settings = {"layer_types": ["full_attention"] * layers} | settings
    config_class, model_class = _ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=vocab_size or len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=spread,
        eos_token_id=WORDS.index("<eos>"),
        pad_token_id=WORDS.index("<eos>"),
        bos_token_id=None,
        **_SETTINGS.get(architecture, {}),
        **settings,
    )
    return model_class(config).eval()


def tiny_target(architecture="qwen3", *, seed=0, spread=0.02, template=OPENED_IN_PROMPT, layers=4):
    tokenizer = tiny_tokenizer(template)
    model = tiny_model(architecture, seed=seed, spread=spread, layers=layers)
    return Target(model, tokenizer, ThinkMarkers.from_tokenizer(tokenizer), name=f"tiny-{architecture}")


def save_tiny(folder, architecture="llama", template=OPENED_IN_PROMPT):
    """Saves a tiny target as transformers does; returns the folder."""
    tiny_model(architecture).save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder
