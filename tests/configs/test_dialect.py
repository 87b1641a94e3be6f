"""YAML as people write it."""

import pytest
import yaml

from configs import dialect


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("7", 7),
        ("010", 10),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("2026-12-01", "2026-12-01"),
        ("1_000", "1_000"),
        ("'5'", "5"),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_a_scalar_is_read_as_the_core_schema_says(text: str, value: object) -> None:
    read = dialect.parse(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["a: 1\na: 2", "x: {b: 1, c: 2, b: 1}", "1: a"])
def test_a_key_that_is_there_twice_or_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"there twice|not a text"):
        dialect.parse(text)


def test_tags_that_build_objects_are_refused() -> None:
    with pytest.raises(yaml.YAMLError):
        dialect.parse("!!python/object/apply:os.system ['true']")


@pytest.mark.parametrize(
    "value", ["yes", "1e5", "5", "true", "", "~", "2e-5", "010", 1e-8, 2e22, 3, False, None, "a: b"]
)
def test_what_is_rendered_reads_back_equal(value: object) -> None:
    again = dialect.parse(dialect.render({"x": value}))
    assert again == {"x": value}
    assert type(again["x"]) is type(value)  # type: ignore[index]
