"""Settings of the model and of the task."""

from __future__ import annotations

from pydantic import Field

from broker.config import StrictModel


class ModelConfig(StrictModel):
    """The policy to train.

    ``path`` is a directory, a hub name, ``tiny`` (built by tasks/tiny_model.py from ``tiny_hidden_size`` and
    ``tiny_layers``), or ``package:<name>`` (a GGUF file inside an installed Python package).
    """

    path: str = Field("tiny", description="a model directory, a hub name owner/name, tiny, or package:NAME; see above")
    dtype: str = Field("float32", description="what the generators compute in; the learner computes in float32")
    tiny_hidden_size: int = Field(64, ge=16, description="of model.path=tiny; a multiple of 32, or 16 without vLLM")
    tiny_layers: int = Field(2, ge=1, description="of model.path=tiny")
    tie_word_embeddings: bool = Field(True, description="of model.path=tiny")
    attention: str = Field(
        "sdpa", description="attention implementation of the learner's model, as transformers names it"
    )


class TaskConfig(StrictModel):
    """Prompts and how answers are scored.

    ``prompts`` and ``rewards`` are ``module:function`` or ``file.py:function``. A prompts function takes
    (split, seed, options) and returns a list of tasks.prompts.Item; a reward function takes
    (text, answer, reference) and returns a float, sync or async.
    """

    prompts: str = Field("tasks.digits:prompts", description="module:function or file.py:function; docs/tasks.md")
    rewards: dict[str, str] = Field(
        default_factory=lambda: {"exact": "tasks.digits:reward"},
        description="a name for each part of the reward, and its function",
    )
    weights: dict[str, float] = Field(default_factory=dict, description="of the parts in the sum; 1.0 if not named")
    options: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="handed to the prompts function"
    )
    chat_template: bool = Field(False, description="make each prompt the user's message in the model's chat template")
    total_epochs: int = Field(0, ge=0, description="0: as many as the steps need")
