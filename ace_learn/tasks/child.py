"""The process in which a program of `ace_learn.tasks.execution` runs.

It is started by path and imports nothing but the standard library.
"""

import json
import os
import resource
import sys
from pathlib import Path
from types import ModuleType

PASSED = 86
"""Exit status of a program that ran to its end; the job's token, written to the given pipe, is the proof of it."""

_MIB = 1 << 20


def main(job: Path, proof: int) -> None:
    """Sets the limits and runs the program; an exception or an early exit ends the process with another status."""
    fields = json.loads(job.read_text(encoding="utf-8"))
    job.unlink()
    program = compile(fields["program"], "answer.py", "exec")
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(fields["seconds"]) + 1),
        (resource.RLIMIT_AS, fields["memory_mib"] * _MIB),
        (resource.RLIMIT_FSIZE, fields["file_mib"] * _MIB),
        (resource.RLIMIT_NOFILE, fields["open_files"]),
    ):
        hard = resource.getrlimit(limit)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lowest, lowest))
    module = ModuleType("answer")
    sys.modules["answer"] = module  # where dataclasses and typing look a class's names up
    try:
        exec(program, module.__dict__)
    except SystemExit:
        os._exit(1)
    os.write(proof, fields["token"].encode())
    os._exit(PASSED)  # threads that it left behind are not waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
