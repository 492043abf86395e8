"""Serves a model with learned exits: `python -m ace_learn.serve --help`."""

from ace_learn.cli.serve import main

if __name__ == "__main__":
    main()
