"""docs/configuration.md names every setting, and is what the models say today."""

from __future__ import annotations

from pathlib import Path

from configs.load import keys, load
from configs.reference import _UNSAID, page
from configs.run import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def rows() -> dict[str, list[str]]:
    """Each setting of the page with its cells."""
    lines = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in lines}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs` (or python -P -m configs.reference > docs/configuration.md)"


def test_every_setting_is_there_with_type_default_and_description() -> None:
    sections = {key.rpartition(".")[0] for key in keys(RunConfig)}
    settings = [key for key in keys(RunConfig) if key not in sections]
    assert list(rows()) != [] and set(rows()) == set(settings)
    for key, cells in rows().items():
        assert len(cells) == 4 and all(cells), f"{key} has no description"


def test_what_is_said_here_for_another_model_is_not_said_there_as_well() -> None:
    described = {
        f"{section}.{name}"
        for section in ("broker", "rollout")
        for name, field in type(getattr(RunConfig(), section)).model_fields.items()
        if field.description
    }
    assert described & set(_UNSAID) == set()


def test_the_way_to_start_from_a_preset_works(tmp_path: Path) -> None:
    from configs import show

    mine = tmp_path / "mine.yaml"
    mine.write_text(show.render(load("quickstart")))
    assert load(mine) == load("quickstart")
