"""Settings of weight sync."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from broker.config import Bytes, Seconds, StrictModel

RELAY_BUCKET_BYTES = 8 << 20  # a larger blob would hold up the leases and heartbeats of others


class WeightsSyncConfig(StrictModel):
    """How policy versions travel from the learner to the generators."""

    transport: Literal["collective", "disk", "relay"] = Field(
        "collective",
        description="collective: process groups; disk: files in a shared folder; relay: through the broker, for "
        "generators that reach nothing else",
    )
    backend: Literal["gloo", "nccl"] = Field("gloo", description="of the transfer groups of transport=collective")
    dir: str = Field(
        "",
        description="of transport=disk: a folder that all machines share, which holds up to four versions; empty: "
        "<run folder>/weights",
    )
    host: str = Field(
        "127.0.0.1",
        description="address of the learner that its ranks and, with collective, generators can reach",
    )
    port: int = Field(0, ge=0, le=65535, description="of the learner's store; 0: a free port")
    interface: str = Field("", description="network interface for gloo; empty: the one that routes to the learner")
    wire_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="what the weights travel in; bfloat16 halves the bytes and rounds"
    )
    keep_fp32: list[str] = Field(
        default_factory=list,
        description="names (with * and ?) of tensors that travel in float32 whatever wire_dtype says",
    )
    sparse: bool = Field(
        True,
        description="send what has changed since a version that the generators hold, where that is less; bit for bit "
        "the same, and one version's bytes more are kept at either end",
    )
    bucket_bytes: Bytes = Field(64 << 20, ge=1 << 10, description="size of one transfer")
    sync_timeout_s: Seconds = Field(30.0, description="deadline of every wait of one transfer")
    no_generator_timeout_s: Seconds = Field(300.0, description="how long the learner goes on without any receiver")
    on_update: Literal["keep", "recompute", "drain"] = Field(
        "keep",
        description="what runs at a swap: keep: goes on with its KV cache; recompute: goes on, its cache filled anew; "
        "drain: ends first, so that no completion has two versions",
    )
    drain_timeout_s: Seconds = Field(
        60.0, description="how long running groups may hold up a swap with `on_update: drain`; the rest are given back"
    )
    verify_load: Literal["first", "always", "never"] = Field(
        "first", description="digest what the engine computes with"
    )

    @property
    def blob_bytes(self) -> int:
        """Of one bucket in a depot: bucket_bytes, through the broker no more than RELAY_BUCKET_BYTES."""
        return min(self.bucket_bytes, RELAY_BUCKET_BYTES) if self.transport == "relay" else self.bucket_bytes

    def staging_device(self, device: str) -> str:
        """Where versions are staged on a side whose model is on ``device``: there for nccl, else on the CPU."""
        return device if self.transport == "collective" and self.backend == "nccl" else "cpu"

    @property
    def grace_s(self) -> float:
        """How long answers that are to have one version may hold up a swap: evaluation's, with drain everyone's."""
        return self.drain_timeout_s if self.on_update == "drain" else min(10.0, self.sync_timeout_s / 2)

    @property
    def in_use_timeout_s(self) -> float:
        """From a version's arrival to the report that it is in use: sync_timeout_s, with drain drain_timeout_s more."""
        return self.sync_timeout_s + (self.drain_timeout_s if self.on_update == "drain" else 0.0)

    @property
    def in_use_setting(self) -> str:
        """The settings behind ``in_use_timeout_s``, for errors."""
        return "weights_sync.sync_timeout_s" + (" + drain_timeout_s" if self.on_update == "drain" else "")

    @field_validator("host")
    @classmethod
    def _routable(cls, host: str) -> str:
        if host in ("0.0.0.0", "::", "*"):
            raise ValueError("is a wildcard; give an address that generators can connect to")
        return host

    @field_validator("interface")
    @classmethod
    def _one_interface(cls, interface: str) -> str:
        if any(mark in interface for mark in "^,= "):
            raise ValueError("gloo takes one interface name, not a list or an exclusion such as NCCL's '^lo'")
        return interface
