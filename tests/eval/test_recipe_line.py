"""Mount layers go into a recipe, and nothing else of it moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from octopus_trl.errors import ConfigError
from octopus_trl.eval.recipe_line import (
    check_recipe,
    mount_line,
    with_mount_layers,
    write_mount_layers,
)
from octopus_trl.models import spec_of
from octopus_trl.train.config import OctopusGRPOConfig, parse_mount_layers
from octopus_trl.train.startup import RecipeParser, load_policy
from tests.tiny import tiny_dense

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "mount_layers: [3, 7]\n"),
        ("seed: 1", "seed: 1\nmount_layers: [3, 7]\n"),
        (
            "# head\nmodel_name_or_path: a  # b\nseed: 1\n",
            "# head\nmodel_name_or_path: a  # b\nmount_layers: [3, 7]\nseed: 1\n",
        ),
        ("mount_layers: attention\nseed: 1\n", "mount_layers: [3, 7]\nseed: 1\n"),
        ("a: 1\nmount_layers: [1]  # old\nb: 2\n", "a: 1\nmount_layers: [3, 7]\nb: 2\n"),
        ("mount_layers:\n  - 1\n  - 2\nseed: 1\n", "mount_layers: [3, 7]\nseed: 1\n"),
        ("mount_layers:\n- 1\n- 2\nseed: 1\n", "mount_layers: [3, 7]\nseed: 1\n"),
        ("mount_layers: [1,\n  2]\nseed: 1\n", "mount_layers: [3, 7]\nseed: 1\n"),
        ("mount_layers: [\n  1, 2\n]\nseed: 1\n", "mount_layers: [3, 7]\nseed: 1\n"),
        ("# mount_layers: [1]\nseed: 1\n", "# mount_layers: [1]\nseed: 1\nmount_layers: [3, 7]\n"),
    ],
)
def test_one_line_changes(text: str, want: str) -> None:
    assert with_mount_layers(text, [3, 7]) == want


def test_every_shipped_recipe_takes_the_line() -> None:
    recipes = sorted((ROOT / "recipes").rglob("config_*.yaml"))
    assert recipes
    for path in recipes:
        text = path.read_text()
        new = with_mount_layers(text, [2, 5])
        assert yaml.safe_load(new) == {**yaml.safe_load(text), "mount_layers": [2, 5]}
        assert set(new.splitlines()) - set(text.splitlines()) == {mount_line([2, 5])}


def test_training_and_evaluation_read_the_line_as_layers(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yaml"
    recipe.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n{mount_line([1, 2])}\n")
    (args,) = RecipeParser([OctopusGRPOConfig]).parse_args_and_config(["--config", str(recipe)])
    assert args.mount_layers == [1, 2]
    model = tiny_dense(0)
    model.save_pretrained(tmp_path / "dense")
    policy = load_policy(str(tmp_path / "dense"), recipe=str(recipe))
    assert spec_of(policy).mount_layers == (1, 2)
    with pytest.raises(ConfigError, match="give layer indices"):
        load_policy(str(tmp_path / "dense"))


@pytest.mark.parametrize("value", [[1.5], [True], [None], "3,x", "", 7, {"a": 1}])
def test_what_is_no_list_of_layers_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="must be attention or layer indices"):
        parse_mount_layers(value)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\n")
    check_recipe(path)
    assert path.read_text() == "seed: 1\n"
    write_mount_layers(path, [1])
    assert path.read_text() == "seed: 1\nmount_layers: [1]\n"
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- 1\n", "holds no mapping"),
        ("a: [1\n", "is no YAML"),
        ("{mount_layers: [5], seed: 1}\n", "stands in no line of its own"),
    ],
)
def test_what_is_no_recipe_is_refused_and_kept(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for attempt in (lambda: check_recipe(path), lambda: write_mount_layers(path, [1])):
        with pytest.raises(ConfigError, match=reason):
            attempt()
    assert path.read_text() == text


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: cannot be read"):
        check_recipe(tmp_path / "none.yaml")
