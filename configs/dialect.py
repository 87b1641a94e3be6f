"""YAML as people write it: the YAML 1.2 core schema, with duplicate keys refused.

YAML 1.1, PyYAML's default, reads ``2e-5`` as a string, ``yes`` and ``off`` as booleans, ``010`` as eight and
``1:30`` as ninety. Each of these has silently changed somebody's run.
"""

from __future__ import annotations

import re

import yaml

_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers of YAML 1.2's core schema."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    prefixed = text.startswith(("0o", "0x"))
    return int(text, 0) if prefixed else int(text)


_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
# Order matters: the first pattern that matches a plain scalar decides, and an integer also looks like a float.
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse(text: str) -> object:
    """The value of one YAML document. Raises yaml.YAMLError, also for a key that is there twice."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only


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
