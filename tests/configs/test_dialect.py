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


NO_SETTINGS = {
    "an alias inside what it stands for": "&x [*x]",
    "the same as a section": "&x {a: {b: *x}}",
    "aliases of aliases": "[&a [1,1,1,1,1,1,1,1,1,1], "
    + ", ".join(
        f"&{after} [{', '.join([f'*{before}'] * 10)}]" for before, after in zip("abcdefg", "bcdefgh", strict=True)
    )
    + "]",
    "bytes": "!!binary aGVsbG8=",
    "a set": "!!set {a, b}",
    "a date": "!!timestamp 2026-12-01",
    "pairs": "!!omap [a: 1]",
    "a word as an integer": "!!int abc",
    "a word as a number": "!!float abc",
    "a word as a truth": "!!bool abc",
    "a word as null": "!!null abc",
    "a list as an integer": "!!int [1]",
    "a word as a section": "!!map abc",
    "a word as a list": "!!seq abc",
    "a word as keys": "!!map [1]",
    "brackets": "[" * 3000 + "]" * 3000,
    "braces": "{a: " * 3000 + "1" + "}" * 3000,
    "a few brackets": "[" * 100 + "]" * 100,
    "digits": "9" * 5000,
    "digits of a float": "1." + "9" * 5000,
    "hexadecimal digits": "0x" + "f" * 5000,
    "half a surrogate pair": r'"\ud800"',
    "half a surrogate pair in a key": r'{"\udfff": 1}',
    "NUL": r'"\0"',
    "a surrogate of the command line": "\udcff",
}


@pytest.mark.parametrize("text", NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_what_no_setting_can_be_is_refused(text: str) -> None:
    for document in (text, f"x: {text}"):
        with pytest.raises(yaml.YAMLError):
            dialect.parse(document)


def test_an_alias_stands_for_a_copy() -> None:
    read = dialect.parse("a: &x {b: [1]}\nc: *x")
    assert read == {"a": {"b": [1]}, "c": {"b": [1]}}
    assert read["a"] is not read["c"]  # type: ignore[index]  # an override of one leaves the other alone


@pytest.mark.parametrize(
    ("text", "value"), [("!!int 010", 10), ("!!float 1", 1.0), ("!!str 1", "1"), ("!!null ''", None)]
)
def test_the_core_schemas_tags_are_read(text: str, value: object) -> None:
    read = dialect.parse(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "value", ["yes", "1e5", "5", "true", "", "~", "2e-5", "010", 1e-8, 2e22, 3, False, None, "a: b"]
)
def test_what_is_rendered_reads_back_equal(value: object) -> None:
    again = dialect.parse(dialect.render({"x": value}))
    assert again == {"x": value}
    assert type(again["x"]) is type(value)  # type: ignore[index]
