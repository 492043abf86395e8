"""Ends answers on a server where they are complete: `python -m ace_learn.stream --help`."""

from ace_learn.cli.stream import main

if __name__ == "__main__":
    main()
