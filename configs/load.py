"""From a YAML file and ``key=value`` overrides to a RunConfig, with errors that name the key and the way out."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from broker.address import without_password
from broker.errors import SlipstreamError
from configs import dialect
from configs.presets import PRESETS, presets
from configs.run import RunConfig

_DEEPEST = 10  # parts of a key; the deepest section has three
_WIDTH = 300  # characters of a message that a file or a command line fills

# What other projects call our keys (docs/glossary.md).
_ELSEWHERE = {
    "learning_rate": "learner.optim.lr",
    "batch_size": "rollout.groups_per_step",
    "train_batch_size": "rollout.groups_per_step",
    "num_generations": "rollout.completions_per_group",
    "group_size": "rollout.completions_per_group",
    "max_new_tokens": "rollout.max_response_length",
    "max_steps": "learner.total_steps",
    "adv_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.loss_mean",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "kl_loss_coef": "algorithm.kl_coef",
    "ppo_epochs": "algorithm.epochs",
    "num_iterations": "algorithm.epochs",
    "num_mini_batches": "algorithm.mini_batches",
    "lam": "algorithm.critic.gae_lambda",
    "cliprange_value": "algorithm.critic.value_clip",
    "off_policy_steps": "rollout.max_staleness",
    "num_generators": "generator.count",
    "num_workers": "generator.count",
    "world_size": "learner.ranks",
    "save_freq": "learner.checkpoint.every_steps",
    "eval_freq": "learner.eval.every_steps",
    "test_freq": "learner.eval.every_steps",
}

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "bool_type": "true or false",
    "model_type": "a section with keys of its own",
    "dict_type": "a section with keys of its own",
    "tuple_type": "a list",
}


class ConfigError(SlipstreamError):
    """The configuration cannot be used; one line per problem."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's configuration from a file, or from a preset by its name, with overrides ``a.b.c=value`` on top.

    Raises ConfigError, which names every problem at once.
    """
    try:
        file = find(path)
        values = dialect.parse(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {_clipped(_one_line(error))}") from error
    except OSError as error:
        raise ConfigError(f"configuration file {_clipped(str(path))!r}: {error.strerror}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected keys and values, found {_clipped(json.dumps(values))}")
    for override in overrides:
        _apply(values, override)
    try:
        # Through JSON, where strict validation takes a list for a tuple and still no "1" for a 1.
        return RunConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, values))) from error


def find(path: Path | str) -> Path:
    """The file that is meant: a path, or the name of a preset. Raises ConfigError with the presets' names."""
    file, preset = Path(path), PRESETS / f"{path}.yaml"
    if file.is_file():
        return file
    if file.name == str(path) and preset.is_file():
        return preset
    if (PRESETS / file.name).is_file() and file.parent.name == PRESETS.name:
        return PRESETS / file.name  # configs/<preset>.yaml, from whatever directory
    names = ", ".join(presets())
    raise ConfigError(f"no configuration file {_clipped(str(path))!r}; presets: {names}")


def _apply(values: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path) or len(path) > _DEEPEST or not key.isprintable():
        raise ConfigError(f"{_clipped(_hidden(override))!r}: expected key=value, such as learner.optim.lr=2e-5")
    try:
        value = dialect.parse(text) if text.strip() else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"{_clipped(_hidden(override))!r}: {_clipped(_hidden(_one_line(error)))}") from error
    section = values
    for name in path[:-1]:
        inner = section.get(name)
        if not isinstance(inner, dict):
            inner = section[name] = {}
        section = inner
    section[path[-1]] = value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _explain(error: ValidationError, values: Mapping[str, object]) -> Iterator[str]:
    """One line per wrong key; a union reports each of its branches, which is one problem to a person."""
    problems: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        problems.setdefault(_key(details["loc"], values), []).append(details)
    for key, branches in problems.items():
        expected = [_EXPECTED[details["type"]] for details in branches if details["type"] in _EXPECTED]
        if len(expected) == len(branches):
            value = _shown(key, branches[0]["input"])
            text = set(expected) == {"a text"} and not isinstance(branches[0]["input"], str | None)
            quoting = "; quote it: " + f'{key}: "…" in a file, {key}=\'"…"\' in a shell' if text else ""
            yield f"{key}={value}: expected {' or '.join(dict.fromkeys(expected))}{quoting}"
        else:
            yield from (_line(key, details) for details in branches)


def _line(key: str, details: ErrorDetails) -> str:
    kind, value = details["type"], _shown(key, details["input"])
    if kind == "extra_forbidden":
        near = nearest(key)
        return f"{key}={value}: unknown key" + (f"; did you mean {near}?" if near else "")
    if kind == "missing":
        return f"{key}: is missing"
    if kind == "literal_error":
        expected = details["ctx"]["expected"]
        words = {word.lower(): word for word in re.findall(r"'(.*?)'", expected)}
        close = difflib.get_close_matches(str(details["input"]).lower(), words, n=1)
        return f"{key}={value}: expected {expected}" + (f"; did you mean {words[close[0]]}?" if close else "")
    if kind == "value_error" and isinstance(details["input"], Mapping):  # about several keys, which it names itself
        return details["msg"].removeprefix("Value error, ")
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}={value}: {message}" if key else message


def _shown(key: str, value: object) -> str:
    """A value as people wrote it, but for the password in a url."""
    if key == "broker.url" and isinstance(value, str):
        value = without_password(value)
    return _clipped(_hidden(json.dumps(value, ensure_ascii=False)))


def _hidden(text: str) -> str:
    """The text without what stands before the @ of a url."""
    return re.sub(r"(://).*@", r"\1***@", text)


def _clipped(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def _key(loc: tuple[int | str, ...], values: Mapping[str, object]) -> str:
    """The dotted key of an error; pydantic's names of union branches are not keys and are left out."""
    path: list[str] = []
    node: object = values
    for part in loc:
        if isinstance(node, Mapping):
            node = node.get(str(part))
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        else:
            break
        path.append(str(part))
    return ".".join(path)


def nearest(key: str) -> str:
    """The known key that ``key`` most likely means, or an empty text."""
    known = list(keys(RunConfig))
    leaf, section = key.rpartition(".")[2], key.rpartition(".")[0]
    if leaf in _ELSEWHERE:
        return _ELSEWHERE[leaf]
    words = {**_ELSEWHERE, **{name.rpartition(".")[2]: name for name in reversed(known)}}
    # Siblings are looked at last, so that of two equal names the one in the same section is meant.
    words |= {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    for vocabulary, text in (({name: name for name in known}, key), (words, leaf)):
        close = difflib.get_close_matches(text, vocabulary, n=1, cutoff=0.85 if text is key else 0.6)
        if close:
            return vocabulary[close[0]]
    return ""


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key a configuration may have, dotted, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
