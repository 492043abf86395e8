"""The ways of drafting that the tiny models know."""

from __future__ import annotations

from typing import Literal, get_args

from ace_learn.json_type import JSON
from ace_learn.testing.vllm.models import TinyModels

Drafting = Literal["none", "self", "draft_model", "ngram", "eagle3", "mtp"]
"""`self` drafts with a copy of the target, `draft_model` with a noisy copy."""
DRAFTINGS: tuple[Drafting, ...] = get_args(Drafting)


def speculation_of(drafting: Drafting, models: TinyModels, num_tokens: int = 4) -> dict[str, JSON] | None:
    """The `speculative_config` of an engine; None for no speculation."""
    if drafting == "none":
        return None
    if drafting == "ngram":
        return {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if drafting == "mtp":
        return {"method": "mtp", "num_speculative_tokens": num_tokens}
    method = "eagle3" if drafting == "eagle3" else "draft_model"
    folder = {"self": models.draft, "draft_model": models.noisy, "eagle3": models.eagle3}[drafting]
    return {"method": method, "model": str(folder), "num_speculative_tokens": num_tokens}
