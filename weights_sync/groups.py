"""Process groups of weight sync: on their own store, apart from torch's default group and from DeepSpeed.

gloo does not notice a peer that is killed in mid-operation, and neither ``abort`` nor ``shutdown`` interrupts a
blocked wait: every operation carries its own deadline, and a group that failed once is thrown away.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from weights_sync.errors import SyncFailed

_JOIN_S = 2.0  # of one try to join a store


@dataclass(frozen=True, kw_only=True)
class Group:
    """A formed group; rank 0 is the learner."""

    process_group: Any
    rank: int
    size: int
    timeout_s: float
    device: str = "cpu"

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's ``tensor`` into everyone's, in place. Raises SyncFailed at the deadline or if a peer is gone."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self.timeout_s)
        try:
            work = self.process_group.broadcast([tensor], options)
            # The margin lets gloo's own deadline end the operation, so that no thread of it is left running.
            work.wait(timedelta(seconds=self.timeout_s + 1.0))
        except RuntimeError as error:
            raise SyncFailed(
                f"broadcast of {tensor.nbytes} bytes failed at rank {self.rank} of {self.size}: {error} "
                f"(deadline: weights_sync.sync_timeout_s = {self.timeout_s:g})"
            ) from error


def group_name(epoch: int, part: int) -> str:
    """Under which a learner rank and the receivers of an epoch form their group."""
    return f"epoch{epoch}.{part}"


def make_group(
    *,
    backend: str,
    store: Store,
    prefix: str,
    rank: int,
    size: int,
    timeout_s: float,
    device: str = "cpu",
    interface: str = "",
    address: str = "",
) -> Group:
    """Forms a group of ``size`` on ``store`` under ``prefix`` (a new one each time: old addresses stay behind).

    Args:
        device: of the tensors to broadcast; ``nccl`` needs a GPU.
        interface: network interface for gloo; empty: the one that owns ``address``.
        address: this process's address as its peers reach it.

    Raises SyncFailed when the group is not complete within ``timeout_s``.
    """
    form = {"gloo": _gloo, "nccl": _nccl}[backend]
    try:
        group = form(PrefixStore(prefix, store), rank, size, timedelta(seconds=timeout_s), interface, address)
    except RuntimeError as error:  # DistStoreError and DistNetworkError derive from it
        raise SyncFailed(
            f"group {prefix} of {size} was not formed at rank {rank} on {device}: {error} "
            f"(deadline: weights_sync.sync_timeout_s = {timeout_s:g})"
        ) from error
    return Group(process_group=group, rank=rank, size=size, timeout_s=timeout_s, device=device)


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, interface: str, address: str) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    device = gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=address)
    options._devices, options._timeout, options._threads = [device], timeout, 2
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta, interface: str, address: str) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent from torch's CPU build

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def host_store(host: str, port: int, timeout_s: float) -> tuple[TCPStore, str]:
    """Serves a store on ``host`` alone (torch by itself would listen on every interface) and returns its address.

    The socket is bound here and handed over, so a free port (0) cannot be taken by someone else in between.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SyncFailed(f"cannot listen on {host}:{port}: {error}; set weights_sync.host / .port") from error
        listener.listen(128)
        bound = listener.getsockname()[1]
        store = TCPStore(
            host,
            bound,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, f"{host}:{bound}"


def join_store(address: str, timeout_s: float) -> TCPStore:
    """A client of the learner's store at ``host:port``. Raises SyncFailed when it does not answer.

    Of many connections to a healthy store torch leaves one now and then without an answer: each try is short.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            # torch retries a refused connection until well past its timeout; a dead learner is known at once.
            socket.create_connection((host, int(port)), left).close()
        except (ValueError, OSError) as error:
            raise _store_is_silent(address, error) from error
        try:
            first = timedelta(seconds=min(_JOIN_S, left))
            store = TCPStore(host, int(port), is_master=False, timeout=first, wait_for_workers=False)
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise _store_is_silent(address, error) from error
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _store_is_silent(address: str, error: Exception) -> SyncFailed:
    return SyncFailed(f"the learner's store at {address} does not answer; check weights_sync.host: {error}")


def route_to(address: str) -> str:
    """This machine's address on the interface that routes to ``host:port`` (no packet is sent)."""
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        name: str = probe.getsockname()[0]
        return name


Resolve = Callable[[str], list[str]]


def resolve(host: str) -> list[str]:
    """Addresses of a host name."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def check_reachable(advertised: str, peer: str, *, resolver: Resolve = resolve) -> None:
    """Raises SyncFailed when a peer on another machine is told a loopback address.

    The usual cause is a host name that /etc/hosts maps to 127.0.1.1.
    """
    if not all(_loopback(address) for address in resolver(advertised)):
        return
    if peer in ("", socket.gethostname(), socket.getfqdn()) or all(_own(address) for address in resolver(peer)):
        return
    raise SyncFailed(
        f"weights_sync.host = {advertised} is a loopback address but generator host {peer} is another machine; "
        "set weights_sync.host to an address of the learner that it can reach"
    )


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _own(address: str) -> bool:
    if _loopback(address):
        return True
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # only an address of this machine can be bound
        except OSError:
            return False
    return True
