"""Engines that decode with the exit rule, contracts and speculation."""

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import load_engine
from ace_learn.engines.requests import Output, Request
from ace_learn.engines.sampling import Sampling

__all__ = ["HFEngine", "Output", "Request", "Sampling", "load_engine"]
