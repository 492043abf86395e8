import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ace_learn.tasks import render_prompt
from ace_learn.thinking import ThinkMarkers

WORDS = ["<unk>", "<think>", "</think>", "<|user|>", "<|assistant|>", "\n", "Hi", "there", "Be", "short", "open"]
MARKERS = ThinkMarkers(start=(1,), end=(2,))
CHAT = ({"role": "user", "content": "Hi there"},)

IGNORES = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}<|assistant|>"
OPENS = IGNORES + " <think>"
KNOWS = IGNORES + "{% if not enable_thinking %} <think> </think>{% endif %}"
OPENS_AND_KNOWS = IGNORES + "{% if enable_thinking %} <think>{% else %} <think> </think>{% endif %}"


def make_tokenizer(template):
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def words(ids):
    return " ".join(WORDS[i] for i in ids)


PROMPT = "<|user|> Hi there <|assistant|>"


@pytest.mark.parametrize(
    ("template", "thinking", "silent"),
    [
        (IGNORES, PROMPT, f"{PROMPT} <think> </think>"),
        (OPENS, f"{PROMPT} <think>", f"{PROMPT} <think> </think>"),
        (KNOWS, PROMPT, f"{PROMPT} <think> </think>"),
        (OPENS_AND_KNOWS, f"{PROMPT} <think>", f"{PROMPT} <think> </think>"),
    ],
)
def test_thinking_on_and_off(template, thinking, silent):
    tokenizer = make_tokenizer(template)
    assert words(render_prompt(tokenizer, CHAT, thinking=True, markers=MARKERS)) == thinking
    assert words(render_prompt(tokenizer, CHAT, thinking=False, markers=MARKERS)) == silent


def test_markers_of_several_tokens():
    markers = ThinkMarkers(start=(10, 1), end=(2, 10))
    ids = render_prompt(make_tokenizer(IGNORES), CHAT, thinking=False, markers=markers)
    assert words(ids) == f"{PROMPT} open <think> </think> open"


def test_plain_prompt_needs_a_tokenizer_without_template():
    chat = ({"role": "system", "content": "Be short"}, *CHAT)
    bare = make_tokenizer(None)
    assert words(render_prompt(bare, chat, thinking=True, markers=MARKERS, plain=True)) == "Be short Hi there"
    silent = render_prompt(bare, chat, thinking=False, markers=MARKERS, plain=True)
    assert words(silent) == "Be short Hi there <think> </think>"
    with pytest.raises(ValueError, match=r"no chat template; .*plain: true"):
        render_prompt(bare, chat, thinking=True, markers=MARKERS)
    with pytest.raises(ValueError, match="leave `plain` off"):
        render_prompt(make_tokenizer(IGNORES), chat, thinking=True, markers=MARKERS, plain=True)


def test_a_chat_that_the_template_refuses_is_the_users_error():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + IGNORES
    chat = ({"role": "system", "content": "Be short"}, *CHAT)
    with pytest.raises(ValueError, match=r"refuses a chat of the turns system, user: no system turn; change the chat"):
        render_prompt(make_tokenizer(refuses), chat, thinking=True, markers=MARKERS)


def test_template_that_ends_in_an_earlier_turns_think_block():
    # A closed block of an earlier turn leaves no block open.
    history = (*CHAT, {"role": "assistant", "content": "<think> Hi </think> there"}, *CHAT)
    ids = render_prompt(make_tokenizer(IGNORES), history, thinking=False, markers=MARKERS)
    assert words(ids[-3:]) == "<|assistant|> <think> </think>"
