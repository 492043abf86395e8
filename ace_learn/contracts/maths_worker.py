"""Child process of `maths`: reads pairs of LaTeX expressions, one JSON list a line, and says whether they are equal."""

import json
import logging
import resource
import signal
import sys

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


def equivalent(a: str, b: str) -> bool:
    """Whether two expressions have the same value; `verify` is not symmetric, so either order will do."""
    first, second = (_parse(text) for text in (a, b))
    if not first or not second:
        return False
    return any(verify(*pair, timeout_seconds=None) for pair in ((first, second), (second, first)))


def _parse(text: str) -> list[object]:
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    return list(parse(f"${text}$", extraction_config=configs, parsing_timeout=None))


def main() -> None:
    """Answers until the input ends, or until one pair takes too much: then the process is killed by its own limits.

    The limits are processor seconds per pair and bytes of memory, the arguments of the program. Seconds on the clock
    would make labels depend on what else the machine does.
    """
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    logging.disable(logging.CRITICAL)  # what cannot be parsed is unequal, and no news
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal kills
        a, b = json.loads(line)
        print(json.dumps(equivalent(a, b)), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


if __name__ == "__main__":
    main()
