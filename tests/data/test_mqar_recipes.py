"""The recipes of multi-query associative recall: one mixer a file, over a base that holds everything else."""

from pathlib import Path

import pytest

from tests.test_recipes import parse

BASE = Path("recipes/mqar/base.yaml")
RECIPES = sorted(r for r in BASE.parent.glob("*.yaml") if r.stem not in ("base", "sweep"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_a_recipe_changes_the_second_mixer_and_perhaps_the_rate_alone(recipe):
    before, after = (parse(*recipes)[1] for recipes in ((BASE,), (BASE, recipe)))
    assert before.model.mixer[0] == after.model.mixer[0]
    for config in (before, after):
        config.model.mixer[1] = config.model.optimizer.lr = None
        config.config = None
    assert before == after
