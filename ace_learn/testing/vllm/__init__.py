"""Tiny models, shims and in-process engines for tests and benches of the vLLM plugin.

    from ace_learn.testing.vllm.shims import use_interpreted_v2                  # V2 on a CPU; before all else
    from ace_learn.testing.vllm.models import tiny_prompts, write_tiny_models
    from ace_learn.testing.vllm.heads import write_test_head
    from ace_learn.testing.vllm.engine import running_engine

Nothing here imports vLLM before an engine is started, and nothing here is used by a server. This file imports nothing:
Triton reads whether to interpret when it is imported, and transformers' models import it.
"""
