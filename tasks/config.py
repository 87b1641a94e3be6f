"""Settings of the model and of the task."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from broker.config import Steps, StrictModel


class ModelConfig(StrictModel):
    """The policy to train.

    ``path`` is a directory, a hub name, ``tiny`` (built by tasks/tiny_model.py from ``tiny_hidden_size`` and
    ``tiny_layers``), or ``package:<name>`` (a GGUF file inside an installed Python package).
    """

    path: str = Field(
        "tiny", min_length=1, description="a model directory, a hub name owner/name, tiny, or package:NAME; see above"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="of generators")
    tiny_hidden_size: int = Field(
        64, ge=16, le=65_536, description="of model.path=tiny; a multiple of 32, or 16 without vLLM"
    )
    tiny_layers: int = Field(2, ge=1, le=1024, description="of model.path=tiny")
    tie_word_embeddings: bool = Field(True, description="of model.path=tiny")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="of the learner; what float32 can use")


class TaskConfig(StrictModel):
    """Prompts and how answers are scored.

    ``prompts`` and ``rewards`` are ``module:function`` or ``file.py:function``. A prompts function takes
    (split, seed, options) and returns a list of tasks.prompts.Item; a reward function takes
    (text, answer, reference) and returns a float, sync or async.
    """

    prompts: str = Field("tasks.digits:prompts", description="module:function or file.py:function; docs/tasks.md")
    rewards: dict[str, str] = Field(
        default_factory=lambda: {"exact": "tasks.digits:reward"},
        min_length=1,
        description="a name for each part of the reward, and its function",
    )
    weights: dict[str, float] = Field(default_factory=dict, description="of the parts in the sum; 1.0 if not named")
    options: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="handed to the prompts function"
    )
    chat_template: bool = Field(False, description="make each prompt the user's message in the model's chat template")
    total_epochs: Steps = Field(0, ge=0, description="0: as many as the steps need")

    @model_validator(mode="after")
    def _weights_have_rewards(self) -> TaskConfig:
        if unknown := sorted(set(self.weights) - set(self.rewards)):
            raise ValueError(f"task.weights: {', '.join(unknown)} not among task.rewards ({', '.join(self.rewards)})")
        return self
