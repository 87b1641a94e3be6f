"""The whole run's configuration: every role's own model, composed."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from broker.config import BrokerConfig, RolloutConfig, Seconds, StrictModel
from generators.config import GeneratorConfig
from learners.combinations import check_group
from learners.config import AlgorithmConfig, LearnerConfig
from tasks.config import ModelConfig, TaskConfig
from telemetry.config import TelemetryConfig
from weights_sync.config import RELAY_BUCKET_BYTES, WeightsSyncConfig

_NAME = re.compile(r"\w[\w.+=,@-]*")  # of a folder of its own: no path, nothing hidden, nothing a shell reads


class LaunchConfig(StrictModel):
    """How `slipstream up` runs the roles."""

    mode: Literal["processes", "serial"] = Field(
        "processes",
        description="processes: each role its own; serial: all in one, for debugging (one rank, transformers)",
    )
    stop_timeout_s: Seconds = Field(8.0, description="from the first signal to SIGKILL")
    watchdog_s: Seconds = Field(300.0, description="without progress for this long, the run ends with the reason")


class RunConfig(StrictModel):
    """One run: its names, and a section for each part of it."""

    project: str = Field("slipstream", description="first part of the run's folder")
    experiment: str = Field("default", description="second part of the run's folder; another name is another run")
    output_dir: str = Field(
        "outputs", min_length=1, description="where the run's folder <output_dir>/<project>/<experiment> is"
    )
    seed: int = Field(0, ge=0, lt=1 << 31, description="of the initial tiny model, the prompts' order and the sampling")
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    broker: BrokerConfig = BrokerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights_sync: WeightsSyncConfig = WeightsSyncConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    launch: LaunchConfig = LaunchConfig()

    @field_validator("project", "experiment")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not _NAME.fullmatch(name) or len(name.encode()) > 200:
            raise ValueError("expected a plain name of letters, digits and . _ - + = , @, without a / and not hidden")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        samples, ranks = self.rollout.samples_per_step, self.learner.ranks
        if samples < ranks:
            raise ValueError(
                f"rollout.groups_per_step x completions_per_group = {samples} is below learner.ranks = {ranks}"
            )
        if self.algorithm.mini_batches > self.rollout.groups_per_step:
            raise ValueError(
                f"algorithm.mini_batches={self.algorithm.mini_batches} are of whole groups, of which a batch has "
                f"rollout.groups_per_step={self.rollout.groups_per_step}: set it no higher"
            )
        check_group(self.algorithm, completions_per_group=self.rollout.completions_per_group)
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        if truncated and not self.rollout.allow_truncated_sampling:
            raise ValueError(
                "rollout.top_p / top_k truncate the distribution; set rollout.allow_truncated_sampling to allow it"
            )
        on_cpu = [name for name in ("learner", "generator") if getattr(self, name).device == "cpu"]
        sync = self.weights_sync
        if sync.transport == "relay" and sync.blob_bytes > self.broker.max_frame_bytes:
            raise ValueError(
                f"weights_sync.transport=relay sends blobs of weights_sync.bucket_bytes={sync.bucket_bytes}, at most "
                f"{RELAY_BUCKET_BYTES}: set it to no more than broker.max_frame_bytes={self.broker.max_frame_bytes}"
            )
        if sync.transport == "collective" and sync.backend == "nccl" and on_cpu:
            raise ValueError(
                f"weights_sync.backend=nccl needs {on_cpu[0]}.device=cuda; on cpu set weights_sync.backend=gloo"
            )
        return self

    @property
    def run_dir(self) -> str:
        """``<output_dir>/<project>/<experiment>``."""
        return f"{self.output_dir}/{self.project}/{self.experiment}"
