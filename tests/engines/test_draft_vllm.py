"""Saved drafts in vLLM (CPU, V1, in this process): they load, and their greedy drafts are those of the HF engine."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from ace_learn.drafts.config import DraftShape
from ace_learn.drafts.draft import fresh_mtp
from ace_learn.models.draft_files import save_draft
from ace_learn.models.target import Target
from ace_learn.reasoner import weights_path
from ace_learn.testing.vllm import mimo
from ace_learn.testing.vllm.engine import running_engine
from ace_learn.thinking import ThinkMarkers
from tests.engines.test_hf import prompts, reasoner_requests
from tests.engines.test_hidden_drafter import slow_drafts
from tests.helpers.drafts import random_draft, trained_draft
from tests.helpers.targets import tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

K = 4


def drafts_in_vllm(model, speculation, asked):
    """What vLLM drafts: (prompt and output so far, drafts) of every step."""
    speculation = speculation | {"num_speculative_tokens": K}
    with running_engine(model, speculation=speculation) as llm:
        from vllm import SamplingParams

        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        propose, seen = runner.drafter.propose, []

        def spy(*args, **named):
            drafts = propose(*args, **named)
            last = named["token_indices_to_sample"]
            if last is None:
                last = named["common_attn_metadata"].query_start_loc[1:] - 1
            places = named["target_positions"][last].tolist()
            seen.extend(zip(runner.input_batch.req_ids, places, drafts.tolist(), strict=False))
            return drafts

        runner.drafter.propose = spy
        sampling = SamplingParams(temperature=0.0, max_tokens=60)
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in asked], sampling, use_tqdm=False)
        texts = {output.request_id: [*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs}
    # Row p of the draft was the newest, so that the tokens up to p + 1 were known. Requests carry a random suffix.
    of = {name: next(texts[key] for key in texts if name.split("-")[0] == key) for name, _, _ in seen}
    return [(of[name][: place + 2], drafts) for name, place, drafts in seen if place + 2 <= len(of[name])]


def agreement(target, draft, proposed):
    same = total = 0
    for ids, drafts in proposed:
        ours, _ = slow_drafts(draft, target, ids, K)
        same += sum(a == b for a, b in zip(drafts, ours, strict=True))
        total += K
    return same / total, total


# fmt: off
VARIANTS = {
    "trained": {},
    "llama": {
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
        "attention_bias": True,
    },
    "qwen3": {"qk_norm": True, "signals": ("progress",)},
}
# fmt: on


@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_drafts_what_the_hf_engine_drafts_with_eagle3(reasoner_target, tmp_path, variant):
    asked = reasoner_requests(reasoner_target, 8)
    if variant == "trained":
        draft = trained_draft(reasoner_target, "eagle3", tuple(reasoner_requests(reasoner_target, 24)))
    else:
        draft = random_draft(reasoner_target, "eagle3", **VARIANTS[variant])
        for name, weight in draft.named_parameters():
            torch.nn.init.uniform_(weight, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.1)
    save_draft(tmp_path, draft, reasoner_target.identity)
    proposed = drafts_in_vllm(
        weights_path(), {"method": "eagle3", "model": str(tmp_path)}, [request.prompt_ids for request in asked]
    )
    share, total = agreement(reasoner_target, draft, proposed)
    assert total > 500
    assert share >= 0.99
    assert len({token for _, drafts in proposed for token in drafts}) > 20


def save_with_draft(folder, target, draft, *, whole):
    """Saves a target and its draft, in one checkpoint or each by itself; returns how vLLM is told of it."""
    save_draft(folder / "draft", draft, target.identity)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    if not whole:
        return {"method": "mtp", "model": str(folder / "draft")}
    merged = load_file(folder / "model.safetensors") | load_file(folder / "draft" / "model.safetensors")
    save_file(merged, folder / "model.safetensors", {"format": "pt"})
    return {"method": "mtp"}


@pytest.mark.parametrize("whole", [True, False])
def test_vllm_drafts_what_the_hf_engine_drafts_with_mtp(tmp_path, whole):
    """A MiMo: a Qwen2 with biases, and an MTP layer, which reads the state before the final norm."""
    mimo.register()
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, eos_token_id=1, pad_token_id=1,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    target = Target(model, tokenizer, ThinkMarkers.from_tokenizer(tokenizer), name="tiny-mimo")
    draft = random_draft(target, "mtp", tap="stream")
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    speculation = save_with_draft(tmp_path, target, draft, whole=whole)
    trunk = model.config.to_dict() | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (tmp_path / "config.json").write_text(json.dumps(trunk | {"num_nextn_predict_layers": 1}))
    proposed = drafts_in_vllm(tmp_path, speculation, prompts(8))
    share, total = agreement(target, draft, proposed)
    assert total > 500
    assert share >= 0.99
    assert len({token for _, drafts in proposed for token in drafts}) > 10


@pytest.mark.parametrize("whole", [True, False])
def test_vllm_drafts_what_the_hf_engine_drafts_with_qwen3_next(tmp_path, whole):
    """A Qwen3-Next with experts and full attention alone, and a block of the shape that training gives it."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.15, eos_token_id=1,
        pad_token_id=1, bos_token_id=None, layer_types=["full_attention"] * 4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    target = Target(model, tokenizer, ThinkMarkers.from_tokenizer(tokenizer), name="tiny-qwen3-next")
    draft = fresh_mtp(DraftShape(style="qwen3_next"), target, signals=()).eval()
    for name, weight in draft.named_parameters():
        torch.nn.init.uniform_(weight, -0.5, 0.5) if "norm" in name else torch.nn.init.normal_(weight, std=0.2)
    speculation = save_with_draft(tmp_path, target, draft, whole=whole)
    proposed = drafts_in_vllm(tmp_path, speculation, prompts(8))
    share, total = agreement(target, draft, proposed)
    assert total > 500
    assert share >= 0.99
    assert len({token for _, drafts in proposed for token in drafts}) > 10
