"""The commands, one file each; `python -m ace_learn.<command>` runs them."""
