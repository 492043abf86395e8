"""Makes or measures the embedded reasoner: `python -m ace_learn.reasoner {train,evaluate} --help`."""

from ace_learn.cli.reasoner import main

if __name__ == "__main__":
    main()
