"""The two models of the recipes: their published config.json, shrunk random copies, and tokenizers of their layout."""

import re

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.helpers.targets import WORDS

QWEN3_4B_THINKING = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "sliding_window": None, "tie_word_embeddings": True, "dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
R1_DISTILL_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip

QWEN_MARKS = ("<|im_start|>", "<|im_end|>")
R1_MARKS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")  # noqa: RUF001

QWEN_OPENS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
R1_LEAVES_TO_MODEL = (
    "{{ bos_token }}{% for message in messages %}{{ '<｜User｜>' + message.content }}{% endfor %}"  # noqa: RUF001
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"  # noqa: RUF001
)
R1_OPENS = R1_LEAVES_TO_MODEL.replace("'<｜Assistant｜>'", "'<｜Assistant｜><think>\n'")  # noqa: RUF001


def layout_tokenizer(template, marks, *, bos, eos):
    """A small tokenizer with a model's marks; as in both models, the think markers are added but not special tokens."""
    words = [*WORDS, *marks]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    by_length = sorted(words, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, by_length))), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token=bos, eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": list(marks)})
    fast.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    fast.chat_template = template
    return fast


def shrunk_config(real, vocab_size, eos_token_id=None):
    """The same architecture, head grouping, tying and rope in small."""
    heads = 2 * real["num_attention_heads"] // real["num_key_value_heads"]
    small = {
        "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": heads,
        "num_key_value_heads": 2, "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": eos_token_id,
    }  # fmt: skip
    head = {"head_dim": 8} if "head_dim" in real else {}
    return AutoConfig.for_model(**real | small | head)


def save_shrunk(folder, real, template, marks, *, bos, eos, thinks_after=None):
    """Saves a shrunk random copy with its tokenizer, as transformers does; returns the folder.

    A model whose template does not open the think block has learned to do so behind the mark `thinks_after`: the output
    row of the think start leans towards that mark's embedding.
    """
    tokenizer = layout_tokenizer(template, marks, bos=bos, eos=eos)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrunk_config(real, len(tokenizer), tokenizer.eos_token_id))
    if thinks_after is not None:
        mark, start = tokenizer.convert_tokens_to_ids([thinks_after, "<think>"])
        with torch.no_grad():
            model.lm_head.weight[start] += torch.nn.functional.normalize(model.model.embed_tokens.weight[mark], dim=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
