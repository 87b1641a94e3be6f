"""Settings of a generator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from broker.config import Bytes, Count, Seconds, StrictModel


class GeneratorConfig(StrictModel):
    """One generator process: its engine and how much it takes on at once."""

    engine: Literal["vllm", "transformers"] = Field(
        "vllm", description="transformers is slower and needs nothing compiled"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where it computes")
    count: int = Field(2, ge=0, le=1024, description="generators that `slipstream up` starts")
    groups_in_flight: Count = Field(8, description="leases held at once")
    max_num_seqs: Count = Field(64, description="completions that the engine samples at once")
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="GPUs of one engine")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="part of a GPU's memory that vLLM takes")
    kv_cache_bytes: Bytes = Field(256 << 20, ge=1, description="KV cache on CPU")
    enforce_eager: bool = Field(True, description="vLLM without compilation or CUDA graphs")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of the engine")
    leave_grace_s: float = Field(
        1.0, ge=0, le=1e6, description="told to leave: how long what runs may take to end; the rest is given back"
    )
    reward_timeout_s: Seconds = Field(10.0, description="of one reward call; beyond it the completion has failed")
    max_failed_groups: Count = Field(20, description="failures in a row after which the generator gives up")
    extra_engine_args: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="passed to vLLM as they are"
    )
    delay_s: float = Field(0.0, ge=0, le=1e6, description="artificial time per group, for measuring overlap")
    completion_delay_s: float = Field(
        0.0, ge=0, le=1e6, description="median of an artificial log-normal time per completion, for measuring staleness"
    )
    completion_delay_sigma: float = Field(1.0, ge=0, le=5, description="standard deviation of that time's logarithm")

    @model_validator(mode="after")
    def _engine_can_be_parallel(self) -> GeneratorConfig:
        if self.engine == "transformers" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"generator.tensor_parallel_size={self.tensor_parallel_size} needs generator.engine=vllm; "
                "transformers computes in one process"
            )
        return self
