"""Whose a data set folder is: the recipe, the model and the problems that it was begun with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ace_learn.artifacts import JSON, dump_config, read_fields, same_config, sha256_json, write_json, write_text
from ace_learn.labels.acceptance import FILE_NAME as ACCEPTANCE_FILE
from ace_learn.labels.probing import Problem
from ace_learn.models.identity import TargetIdentity

if TYPE_CHECKING:
    from ace_learn.labels.build import BuildConfig

_RECIPE, _CLAIM, _SHARDS = "config.yaml", "claim.json", "shards"


def refuse_other_recipe(config: BuildConfig, folder: Path) -> None:
    """Refuses a folder that was begun with another recipe; where it lies is no part of the recipe.

    Raises:
        ValueError: The folder is another recipe's, or nobody knows whose its shards are.
    """
    recipe = folder / _RECIPE
    if recipe.exists() and not same_config(config, recipe, ignoring=("output",)):
        raise ValueError(f"{folder} was built from another recipe (see {recipe}); name another --output or delete it")
    if not recipe.exists() and any((folder / _SHARDS).glob("*")):
        raise ValueError(f"{folder} holds shards but no {_RECIPE}; name another --output or delete it")


def claim(config: BuildConfig, folder: Path, target: TargetIdentity, problems: Sequence[Problem]) -> None:
    """Takes a folder for this recipe, model and problems, or makes sure that it is theirs.

    A recipe names the model and the problems by their paths, and what lies there may change between two runs: then the
    shards of one data set would come from two models or two tables.

    Raises:
        ValueError: The model or the problems are others than those that the folder was begun with.
    """
    problems_sha256 = sha256_json([_problem(problem) for problem in problems])
    if not (folder / _RECIPE).exists():
        write_json(folder / _CLAIM, {"target": target.to_json(), "problems_sha256": problems_sha256})
        write_text(folder / _RECIPE, dump_config(config))
        return
    if not (folder / _CLAIM).exists():
        raise ValueError(
            f"{folder} was begun without a {_CLAIM}, by another version; name another --output or delete it"
        )
    found = read_fields(folder / _CLAIM)
    begun_with = TargetIdentity.from_json(found.fields("target").data)
    changed = [f"the model ({difference})" for difference in target.mismatches(begun_with)]
    if found.text("problems_sha256") != problems_sha256:
        changed.append("the problems or their prompts (the table, the task or the chat template)")
    if changed:
        raise ValueError(
            f"{folder} was begun with others than this recipe now names: {'; '.join(changed)} changed since "
            "('there' is the folder's side). Name another --output, delete the folder, or put back what has changed"
        )


def release(folder: Path) -> None:
    """Gives a folder up whose shards hold nothing to learn from, so that a corrected recipe may take it."""
    shutil.rmtree(folder / _SHARDS)
    (folder / _SHARDS).mkdir()
    for name in (_RECIPE, _CLAIM, ACCEPTANCE_FILE):
        (folder / name).unlink(missing_ok=True)


def _problem(problem: Problem) -> list[JSON]:
    contract: JSON = problem.example.contract.to_spec()
    prompts: list[JSON] = [list(problem.request.prompt_ids), list(problem.no_think.prompt_ids)]
    return [problem.split, problem.example.family, *prompts, contract, problem.example.gold]
