"""Settings that no run could work with are refused while they are still only settings."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from configs.load import ConfigError, keys, load
from configs.run import RunConfig

NOT_NUMBERS = [".inf", "-.inf", ".nan", "1e999"]
HUGE = "1" + "0" * 21  # 1e21 as an integer: too much for 64 bits


def leaves(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is no section, with its type."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation


def assignments(key: str, kind: Any, number: str, wanted: type) -> Iterator[str]:
    """Overrides that put ``number`` wherever ``key`` takes a number of the type ``wanted``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from assignments(key, arguments[0], number, wanted)
    elif kind is wanted:
        yield f"{key}={number}"
    elif origin in (Union, types.UnionType):
        # A whole number is a number: where both are taken there is no bound to keep.
        kept = arguments if wanted is float or float not in arguments else ()
        yield from (text for inner in kept for text in assignments(key, inner, number, wanted))
    elif origin is dict:
        yield from assignments(f"{key}.exact", arguments[1], number, wanted)
    elif origin is tuple:
        for place, inner in enumerate(arguments):
            values = ["0.5"] * len(arguments)
            for text in assignments(key, inner, number, wanted):
                values[place] = text.partition("=")[2]
                yield f"{key}=[{', '.join(values)}]"


FLOATS = [text for number in NOT_NUMBERS for key, kind in leaves() for text in assignments(key, kind, number, float)]
INTEGERS = [text for number in (HUGE, "1e21") for key, kind in leaves() for text in assignments(key, kind, number, int)]


def test_all_kinds_of_settings_are_walked() -> None:
    known = {key for key, _ in leaves()}
    assert known <= set(keys(RunConfig))
    tried = {text.partition("=")[0] for text in (*FLOATS, *INTEGERS)}
    assert {"seed", "learner.optim.betas", "task.weights.exact", "task.options.exact", "broker.heartbeat_s"} <= tried


@pytest.mark.parametrize("override", FLOATS)
def test_no_setting_takes_what_is_no_finite_number(override: str) -> None:
    with pytest.raises(ConfigError, match="finite number") as caught:
        load("quickstart", [override])
    assert override.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", INTEGERS)
def test_no_whole_number_is_boundless(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [override])
    assert str(caught.value).startswith(override.partition("=")[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("telemetry.log_level=LOUD", "expected 'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL'"),
        ("telemetry.log_level=warn", "did you mean WARNING?"),
        ("model.dtype=float99", "did you mean float32?"),
        ("model.attention=magic", "expected 'sdpa' or 'eager'"),
        ("model.path=", "model.path"),
        ("learner.device=tpu9", "expected 'cpu' or 'cuda'"),
        ("generator.device=tpu9", "expected 'cpu' or 'cuda'"),
        ("learner.checkpoint.resume=nevr", "expected 'auto', 'never', or the path of a checkpoint"),
        ("learner.checkpoint.resume=", "expected 'auto', 'never', or the path of a checkpoint"),
        ("project=", "plain name"),
        ("experiment=", "plain name"),
        ("experiment=../../x", "plain name"),
        ("experiment=/etc", "plain name"),
        ("experiment=..", "plain name"),
        ("experiment=.hidden", "plain name"),
        ('experiment="a\\nb"', "plain name"),
        (f"experiment={'x' * 300}", "plain name"),
        ("output_dir=", "at least 1 character"),
        ("seed=-1", "greater than or equal to 0"),
        ("seed=4294967296", "less than 2147483648"),
        ("learner.optim.betas=[0.9, 2.0]", "less than 1"),
        ("learner.optim.betas=[-0.1, 0.9]", "greater than or equal to 0"),
        ("learner.total_steps=0", "greater than or equal to 1"),
        ("learner.eval.every_steps=-1", "greater than or equal to 0"),
        ("weights_sync.bucket_bytes=1", "greater than or equal to 1024"),
        ("generator.kv_cache_bytes=0", "greater than or equal to 1"),
        ("broker.max_frame_bytes=1", "greater than or equal to 4096"),
        ("broker.max_buffer_bytes=1", "greater than or equal to 1048576"),
        ("rollout.temperature=0.001", "greater than or equal to 0.01"),
        ("learner.collective_timeout_s=1e7", "less than or equal to 1000000"),
        ("learner.ranks=1000000", "less than or equal to 1024"),
        ("task.rewards={}", "at least 1 item"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_what_can(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [override])
    assert str(caught.value).startswith(override.partition("=")[0])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["broker.heartbeat_s=10"], ["broker.heartbeat_s=10", "broker.member_timeout_s=10"]),
        (["broker.heartbeat_s=5", "broker.lease_timeout_s=4"], ["broker.heartbeat_s=5", "broker.lease_timeout_s=4"]),
        (["learner.backend=nccl"], ["learner.backend=nccl", "learner.device=cuda"]),
        (["weights_sync.backend=nccl"], ["weights_sync.backend=nccl", "learner.device=cuda"]),
        (
            ["generator.engine=transformers", "generator.tensor_parallel_size=2"],
            ["generator.tensor_parallel_size=2", "generator.engine=vllm"],
        ),
        (["weights_sync.backend=nccl", "learner.device=cuda"], ["weights_sync.backend=nccl", "generator.device=cuda"]),
        (["learner.offload_param=true", "learner.zero_stage=2"], ["learner.offload_param", "learner.zero_stage=3"]),
        (["learner.offload_optimizer=true", "learner.zero_stage=0"], ["learner.offload_optimizer", "zero_stage"]),
        (["learner.offload_optimizer=nvme"], ["learner.offload_dir"]),
        (["learner.offload_optimizer=nvme", "learner.zero_stage=2"], ["offload_optimizer=nvme", "zero_stage=3"]),
        (["learner.device=cuda", "learner.optim.optimizer=cpu_adamw"], ["cpu_adamw", "learner.offload_optimizer=cpu"]),
        (["task.weights.style=1"], ["task.weights: style", "task.rewards (exact)"]),
    ],
)
def test_values_that_cannot_work_together_are_refused_by_their_names(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load("quickstart", overrides)
    assert all(part in str(caught.value) for part in named)
    assert len(str(caught.value)) < 200  # the keys, not the whole section


@pytest.mark.parametrize(
    "overrides",
    [
        ["telemetry.log_level=debug"],
        ["learner.checkpoint.resume=./kept"],
        ["learner.checkpoint.resume=/runs/a/checkpoints/step_000010"],
        ["experiment=lr=2e-5,betas_0.9+x@2"],
        ["learner.device=cuda", "generator.device=cuda", "learner.backend=nccl", "weights_sync.backend=nccl"],
        ["learner.offload_param=true", "learner.offload_optimizer=true"],
        ["learner.offload_optimizer=nvme", "learner.offload_dir=/fast"],
        ["learner.optim.optimizer=sgd", "learner.optim.momentum=0.9", "learner.dtype=bfloat16"],
        ["seed=2147483647"],
    ],
)
def test_what_can_work_is_taken(overrides: list[str]) -> None:
    load("quickstart", overrides)
