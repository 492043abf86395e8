import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.data import build_tokenizer
from ace_learn.reasoner.tokenizer import SPECIAL_TOKENS, token_id

TOKENIZER = build_tokenizer(ReasonerTrainingConfig(tokenizer_samples=200))
MESSAGES = [{"role": "user", "content": "Compute 12 + 3."}]


@settings(max_examples=50)
@given(st.text())
def test_any_text_survives(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


@given(st.text(alphabet="0123456789 .,+-=*()\n{}abAB"))
def test_digits_stand_alone(text):
    for token in TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text, add_special_tokens=False)):
        assert len(token) == 1 or not any(char.isdigit() for char in token)


@pytest.mark.parametrize("text", ["80.\n\n57", "a\n\nb", ".\n\n", "\n\n"])
def test_a_blank_line_is_one_token(text):
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text, add_special_tokens=False))
    assert tokens.count("ĊĊ") == 1
    assert not any("Ċ" in token for token in tokens if token != "ĊĊ")


def test_special_tokens_are_one_token_each():
    for token in SPECIAL_TOKENS:
        assert TOKENIZER.encode(f"1{token}2", add_special_tokens=False)[1:-1] == [token_id(TOKENIZER, token)]
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"


def test_chat_template_with_thinking():
    text = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nCompute 12 + 3.<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_without_thinking():
    text = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_saving_keeps_everything(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "57 + 23 = 80.\n\nWait<think>"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.eos_token, loaded.pad_token) == (TOKENIZER.eos_token, TOKENIZER.pad_token)
