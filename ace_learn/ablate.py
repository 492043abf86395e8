"""Compares heads and exit policies on stored probes: `python -m ace_learn.ablate --help`."""

from ace_learn.cli.ablate import main

if __name__ == "__main__":
    main()
