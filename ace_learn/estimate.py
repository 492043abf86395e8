"""Estimates memory and time of a build: `python -m ace_learn.estimate --help`."""

from ace_learn.cli.estimate import main

if __name__ == "__main__":
    main()
