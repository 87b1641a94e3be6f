"""YAML as people write it: the YAML 1.2 core schema, with duplicate keys refused.

YAML 1.1, PyYAML's default, reads ``2e-5`` as a string, ``yes`` and ``off`` as booleans, ``010`` as eight and
``1:30`` as ninety. Each of these has silently changed somebody's run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import yaml

_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")


_DIGITS = 100  # of one number; Python itself refuses to print the longest
_DEPTH = 50
_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers and the tags of YAML 1.2's core schema."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected keys and values", node.start_mark)
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _scalar(pattern: re.Pattern[str], name: str, convert: Callable[[str], object]) -> Callable[..., object]:
    """Constructs what ``pattern`` matches; a tag may claim it of any text."""

    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> object:
        text = str(loader.construct_scalar(node))
        if not pattern.match(text):
            raise yaml.constructor.ConstructorError(None, None, f"{text[:_DIGITS]!r} is not {name}", node.start_mark)
        if len(text) > _DIGITS:
            raise yaml.constructor.ConstructorError(None, None, f"{name} of {len(text)} digits", node.start_mark)
        return convert(text)

    return construct


def _int(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
# Order matters: the first pattern that matches a plain scalar decides, and an integer also looks like a float.
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_CONSTRUCTORS = {  # all there are; YAML 1.1 has sets, dates and bytes besides, which no setting takes
    "int": _scalar(_INT, "an integer", _int),
    "float": _scalar(_FLOAT, "a number", _float),
    "bool": _scalar(_BOOL, "true or false", lambda text: text.lower() == "true"),
    "null": _scalar(_NULL, "null", lambda text: None),
    "str": yaml.SafeLoader.construct_yaml_str,
    "seq": yaml.SafeLoader.construct_yaml_seq,
    "map": yaml.SafeLoader.construct_yaml_map,
}
_Loader.yaml_constructors = {f"tag:yaml.org,2002:{tag}": construct for tag, construct in _CONSTRUCTORS.items()}
_Loader.yaml_constructors[None] = yaml.SafeLoader.construct_undefined


def parse(text: str) -> object:
    """The value of one YAML document, a tree of plain values. Raises yaml.YAMLError, which says what is wrong with it.

    A key that is there twice is wrong, and so is what is no tree (an alias inside what it stands for), no text (half a
    surrogate pair, NUL) or far too much (an alias of aliases of aliases).
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    return _tree(value, iter(range(_VALUES)), _DEPTH)


def _tree(value: object, budget: Iterator[int], depth: int) -> object:
    """A copy in which nothing is there twice."""
    if next(budget, None) is None:
        raise yaml.YAMLError(f"more than {_VALUES} values")
    if not depth:
        raise yaml.YAMLError(f"nested more than {_DEPTH} levels deep, or an alias inside what it stands for")
    if isinstance(value, dict):
        return {_tree(key, budget, depth - 1): _tree(inner, budget, depth - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_tree(inner, budget, depth - 1) for inner in value]
    if isinstance(value, str) and (strange := _NO_TEXT.search(value)):
        raise yaml.YAMLError(f"a text with the character U+{ord(strange[0]):04X}, which is none")
    return value


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what the core schema would read as something else than a text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return dumper.represent_scalar("tag:yaml.org,2002:float", special.get(repr(value), repr(value)))


_Dumper.add_representer(float, _represent_float)


def render(value: object) -> str:
    """The YAML document of plain values; ``parse`` reads it back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
