"""Settings of the model and of the task."""

from __future__ import annotations

from pydantic import Field

from broker.config import StrictModel


class ModelConfig(StrictModel):
    """The policy to train.

    ``path`` is a directory, a hub name, ``tiny`` (built by tasks/tiny_model.py from ``tiny_hidden_size`` and
    ``tiny_layers``), or ``package:<name>`` (a GGUF file inside an installed Python package).
    """

    path: str = "tiny"
    dtype: str = "float32"
    tiny_hidden_size: int = Field(64, ge=16)
    tiny_layers: int = Field(2, ge=1)
    tie_word_embeddings: bool = True
    attention: str = "sdpa"


class TaskConfig(StrictModel):
    """Prompts and how answers are scored.

    ``prompts`` and ``rewards`` are ``module:function`` or ``file.py:function``. A prompts function takes
    (split, seed, options) and returns a list of tasks.prompts.Item; a reward function takes
    (text, answer, reference) and returns a float, sync or async.
    """

    prompts: str = "tasks.digits:prompts"
    rewards: dict[str, str] = Field(default_factory=lambda: {"exact": "tasks.digits:reward"})
    weights: dict[str, float] = Field(default_factory=dict, description="of the reward parts; 1.0 if not named")
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    chat_template: bool = False
    total_epochs: int = Field(0, ge=0, description="0: as many as the steps need")
