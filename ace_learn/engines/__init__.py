"""Engines that decode with the exit rule, contracts and speculation."""
