"""Settings of the broker and of what is sampled."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from broker.address import BACKENDS, check_host, check_url, is_loopback


class StrictModel(BaseModel):
    """Refuses unknown keys and silent conversions; values never change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


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
    lease_timeout_s: float = Field(30.0, gt=0)
    member_timeout_s: float = Field(10.0, gt=0)
    heartbeat_s: float = Field(1.0, gt=0)
    max_attempts: int = Field(3, ge=1)
    reconnect_timeout_s: float = Field(60.0, gt=0)
    max_frame_bytes: int = Field(256 << 20, gt=0, description="of one prompt, group or call")
    max_buffer_bytes: int = Field(4 << 30, gt=0, description="of delivered groups; beyond it producers wait")
    push_timeout_s: float = Field(600.0, gt=0, description="how long a producer waits for room")
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


class RolloutConfig(StrictModel):
    """What is sampled for one learner step, and how old it may be when it is trained."""

    groups_per_step: int = Field(16, ge=1, description="B: prompts a learner step")
    completions_per_group: int = Field(8, ge=1, description="n: completions a prompt")
    max_staleness: int = Field(1, ge=0, description="η: learner steps between sampling and training a token")
    on_stale: Literal["mask", "drop"] = "mask"
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    allow_truncated_sampling: bool = False
    max_prompt_length: int = Field(64, ge=1, description="tokens; longer prompts are left out, and counted")
    max_response_length: int = Field(16, ge=1, description="tokens")
    group_timeout_s: float = Field(300.0, gt=0)

    @property
    def samples_per_step(self) -> int:
        """B · n."""
        return self.groups_per_step * self.completions_per_group

    @property
    def window(self) -> int:
        """Outstanding groups allowed: (η + 1) · B."""
        return (self.max_staleness + 1) * self.groups_per_step
