"""The embedded reasoner's tokenizer: byte-level BPE in which every digit and every blank line stands alone."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_START = "<think>"
THINK_END = "</think>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, THINK_START, THINK_END)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

# Order matters: blank lines and digits are cut out first, so that no merge can cross them.
_PIECES = Regex(r"\n\n|\n|[0-9]| ?[A-Za-z]+| [+\-*=] | \(|[^\sA-Za-z0-9]+|\s")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on plain texts; any text can be encoded, since all bytes are in the vocabulary.

    Args:
        texts: Texts without special tokens.
        vocab_size: Tokens in total, special ones included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, THINK_START, THINK_END],
        model_max_length=1024,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of one token of the vocabulary."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found
