"""Settings of the broker and of what is sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from broker.address import BACKENDS, check_host, check_url, is_loopback


class StrictModel(BaseModel):
    """Refuses unknown keys, silent conversions and numbers that are none; values never change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


# Bounds beyond which no machine can do what is asked; without them a typing error ends deep inside a library.
Seconds = Annotated[float, Field(gt=0, le=1e6)]  # poll and epoll take milliseconds of 31 bits, which is 24 days
Bytes = Annotated[int, Field(le=1 << 50)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]  # of what one machine holds at once
Steps = Annotated[int, Field(le=1_000_000_000)]  # of what goes by in a run


class BrokerConfig(StrictModel):
    """Where the broker is and how long anyone waits for it."""

    backend: Literal["zmq", "redis"] = "zmq"
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: a free port, chosen by the operating system")
    url: str = Field("", description="an existing broker: tcp://host:port or redis://host:port/0; empty: we start one")
    security: Literal["auto", "curve", "none"] = Field(
        "auto", description="ZeroMQ: who may connect; auto: curve (keys, encrypted) unless only this machine can"
    )
    key_file: str = Field("", description="what lets a client in under curve; empty: <run folder>/broker.key")
    namespace: str = Field("", description="prefix of the Redis keys; empty: <project>/<experiment>")
    lease_timeout_s: Seconds = 30.0
    member_timeout_s: Seconds = 10.0
    heartbeat_s: Seconds = 1.0
    max_attempts: Count = 3
    reconnect_timeout_s: Seconds = 60.0
    max_frame_bytes: Bytes = Field(256 << 20, ge=1 << 12, description="of one prompt, group or call")
    max_buffer_bytes: Bytes = Field(4 << 30, ge=1 << 20, description="of delivered groups; beyond it producers wait")
    max_blob_bytes: Bytes = Field(
        8 << 30, ge=1 << 20, description="of weights on their way through it (weights_sync.transport = relay)"
    )
    push_timeout_s: Seconds = Field(600.0, description="how long a producer waits for room")
    durability: Literal["memory", "disk"] = Field("memory", description="whether the broker's state survives its end")
    data_dir: str = Field("", description="where the state is kept; empty: <run folder>/broker")

    @model_validator(mode="before")
    @classmethod
    def _backend_of_url(cls, values: Any) -> Any:
        """A url says which backend it is of; only a backend that says otherwise is a mistake."""
        if isinstance(values, dict) and "backend" not in values and isinstance(values.get("url"), str):
            backend = BACKENDS.get(values["url"].partition(":")[0])
            return values | {"backend": backend} if backend else values
        return values

    @field_validator("host")
    @classmethod
    def _host_is_one(cls, host: str) -> str:
        check_host(host)
        return host

    @field_validator("namespace")
    @classmethod
    def _namespace_is_one(cls, namespace: str) -> str:
        if not namespace.isprintable() or "{" in namespace or "}" in namespace:
            raise ValueError("expected a text without braces and control characters: it stands in braces in every key")
        return namespace

    @field_validator("data_dir", "key_file")
    @classmethod
    def _names_a_place(cls, place: str) -> str:
        if not place.isprintable():
            raise ValueError("expected a path without newlines and other control characters")
        return place

    @field_validator("url")
    @classmethod
    def _url_names_a_broker(cls, url: str, info: ValidationInfo) -> str:
        if not url:
            return url
        check_url(url)
        backend = BACKENDS[url.partition(":")[0]]
        if info.data.get("backend", backend) != backend:
            raise ValueError(f"is of a {backend} broker, but broker.backend is {info.data['backend']}: change one")
        return url

    @field_validator("security")
    @classmethod
    def _security_is_enough(cls, security: str, info: ValidationInfo) -> str:
        backend, host = info.data.get("backend", "zmq"), info.data.get("host", "127.0.0.1")
        if security == "curve" and backend == "redis":
            raise ValueError("is for ZeroMQ; Redis has its password, and TLS with a url that begins with rediss://")
        if security == "none" and backend == "zmq" and not is_loopback(host):
            raise ValueError(
                f"anyone who reaches broker.host = {host} could join the run: set broker.security = curve"
                " (or auto), or broker.host = 127.0.0.1"
            )
        return security

    @model_validator(mode="after")
    def _members_outlive_their_heartbeat(self) -> BrokerConfig:
        for name in ("member_timeout_s", "lease_timeout_s"):
            if self.heartbeat_s >= getattr(self, name):
                raise ValueError(
                    f"broker.heartbeat_s={self.heartbeat_s:g} must be below broker.{name}={getattr(self, name):g},"
                    " or everyone is given up between two heartbeats"
                )
        return self


class RolloutConfig(StrictModel):
    """What is sampled for one learner step, and how old it may be when it is trained."""

    groups_per_step: Count = Field(16, description="B: prompts a learner step")
    completions_per_group: Count = Field(8, description="n: completions a prompt")
    max_staleness: int = Field(1, ge=0, le=10_000, description="η: learner steps between sampling and training a token")
    on_stale: Literal["mask", "drop"] = "mask"
    temperature: float = Field(1.0, ge=0.01, le=100, description="vLLM samples at no lower one")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=10_000_000)
    allow_truncated_sampling: bool = False
    max_prompt_length: Count = Field(64, description="tokens; longer prompts are left out, and counted")
    max_response_length: Count = Field(16, description="tokens")
    group_timeout_s: Seconds = 300.0

    @property
    def samples_per_step(self) -> int:
        """B · n."""
        return self.groups_per_step * self.completions_per_group

    @property
    def window(self) -> int:
        """Outstanding groups allowed: (η + 1) · B."""
        return (self.max_staleness + 1) * self.groups_per_step
