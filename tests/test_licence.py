"""The licence that pyproject.toml names is there."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_licence_that_the_project_names_is_in_the_checkout() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    text = (ROOT / "LICENSE").read_text()
    assert named == "Apache-2.0"
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "Copyright The Slipstream authors" in text
