import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ace_learn.reasoner import FAMILIES, generate_problems, weights_path


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(weights_path())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(weights_path())


def generate(model, tokenizer, prompt: str, **template: bool) -> str:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **template,
    )
    output = model.generate(**inputs, do_sample=False, temperature=None, max_new_tokens=400)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_the_folder_is_small():
    assert sum(file.stat().st_size for file in weights_path().iterdir()) <= 8e6
    assert (weights_path() / "model.safetensors").exists()


def test_the_weights_are_a_float32_qwen3(model, tokenizer):
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("family", FAMILIES)
def test_it_thinks_checks_and_answers(model, tokenizer, family):
    right = 0
    for problem in generate_problems(family, 4, seed=77, answer_format="boxed"):
        text = generate(model, tokenizer, problem.prompt)
        assert text.startswith("<think>\n")
        think, answer = text.split("</think>\n\n")
        assert "So the answer is" in think
        assert text.endswith("<|im_end|>")
        found = re.search(r"\\boxed\{(\d+)\}", answer)
        assert found is not None
        right += int(found[1]) == problem.value
    assert right >= 3


def test_it_answers_directly_without_thinking(model, tokenizer):
    problem = next(generate_problems("chain", 1, seed=77, answer_format="json"))
    text = generate(model, tokenizer, problem.prompt, enable_thinking=False)
    assert "<think>" not in text
    assert '{"answer": ' in text
