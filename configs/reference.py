"""``python -m configs.reference``: the page docs/configuration.md, from the models of the settings."""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.run import RunConfig

_SIGNS = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
_OUT_OF_REACH = 1e6
_PLAIN = {str: "text", int: "integer", float: "number", bool: "true or false"}
_UNSAID: dict[str, str] = {  # what the models of broker/ have no description of
    "broker.backend": "the server: our own (`zmq`) or Redis; docs/broker.md compares them",
    "broker.host": "address to listen on; one that the other hosts reach",
    "broker.lease_timeout_s": "a lease without a heartbeat for this long is over; its prompt is queued again",
    "broker.member_timeout_s": "a member without a heartbeat for this long is gone",
    "broker.heartbeat_s": "how often a generator reports",
    "broker.max_attempts": "failed attempts at one prompt after which it is given up",
    "broker.reconnect_timeout_s": "how long a client waits for a silent broker before it ends with an error",
    "rollout.on_stale": "too old a token: `mask` makes it context only, `drop` leaves its whole group out",
    "rollout.top_p": "nucleus sampling; below 1 needs `allow_truncated_sampling`",
    "rollout.top_k": "above 0 needs `allow_truncated_sampling`",
    "rollout.allow_truncated_sampling": "sample from another distribution than the one that is trained",
    "rollout.group_timeout_s": "a group that takes longer is ended with what it has",
}
_HEAD = """\
# Configuration

Every setting, with its default. Made by `make docs` from the models that check a configuration; do not edit it by hand.

A setting is given on the command line (`learner.optim.lr=2e-5`) or in a YAML file (`-c mine.yaml`), where the parts of
its name are nested sections. The command line wins over the file, and the file over the defaults below. Unknown names,
and values of another type, are refused with the nearest name there is. Upper bounds that only a typing error reaches
are left out here.

**A file of your own stands on these defaults, and not on a preset's.** To start from a preset, write it out whole and
change what you want: `slipstream config show -c quickstart > mine.yaml`. The presets are `configs/*.yaml`:
`slipstream up --help` lists them.
"""


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_HEAD, *_section("", RunConfig)])


def _section(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """The model's own settings as a table, then each section below it."""
    fields = {f"{prefix}{name}": field for name, field in model.model_fields.items()}
    inner = {key: _model(field) for key, field in fields.items()}
    yield f"## `{prefix.rstrip('.')}`\n" if prefix else "## The run\n"
    yield re.sub(r"``([^`]*)``", r"`\1`", " ".join((model.__doc__ or "").split())) + "\n"
    rows = [_row(key, field) for key, field in fields.items() if inner[key] is None]
    if rows:
        yield "\n".join(["| setting | type | default | what |", "|---|---|---|---|", *rows]) + "\n"
    for key, section in inner.items():
        if section is not None:
            yield from _section(f"{key}.", section)


def _row(key: str, field: FieldInfo) -> str:
    default = json.dumps(field.get_default(call_default_factory=True), ensure_ascii=False)
    text = (field.description or _UNSAID.get(key, "")).replace("|", "\\|")
    return f"| `{key}` | {_type(field)} | `{default}` | {text} |"


def _model(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _type(field: FieldInfo) -> str:
    """What may be given, in words, with its bounds: the lower one first, and no upper one that nobody reaches."""
    given = [(sign, getattr(mark, name)) for mark in field.metadata for name, sign in _bound(mark)]
    lower = [f"{sign} {value}" for sign, value in given if sign in "≥>"]
    upper = [f"{sign} {value}" for sign, value in given if sign in "≤<" and value < _OUT_OF_REACH]
    return ", ".join([_words(field.annotation), *lower, *upper])


def _bound(mark: object) -> Iterator[tuple[str, str]]:
    if type(mark) in _SIGNS:
        yield _SIGNS[type(mark)]


def _words(kind: object) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(one) for one in arguments)
    if origin is dict:
        return f"names with {_words(arguments[1])}"
    if origin in (tuple, list):
        return "list of " + ", ".join(_words(one) for one in arguments)
    assert isinstance(kind, type) and kind in _PLAIN, kind
    return _PLAIN[kind]


if __name__ == "__main__":
    sys.stdout.write(page())
