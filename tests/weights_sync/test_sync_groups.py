import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed
from weights_sync.groups import Group, check_reachable, host_store, join_store, make_group, route_to


def pair(prefix: str, timeout_s: float = 10.0) -> tuple[Group, Group]:
    """The two ranks of a group, formed from two threads over a store of their own."""
    master, address = host_store("127.0.0.1", 0, timeout_s)
    stores = [master, join_store(address, timeout_s)]

    def form(rank: int) -> Group:
        return make_group(
            backend="gloo",
            store=stores[rank],
            prefix=prefix,
            rank=rank,
            size=2,
            timeout_s=timeout_s,
            address=route_to(address),
        )

    with ThreadPoolExecutor(2) as threads:
        root, other = threads.map(form, (0, 1))
    return root, other


def assert_a_broadcast_passes(root: Group, other: Group) -> None:
    sent, got = torch.arange(10.0), torch.zeros(10)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda side: side[0].broadcast(side[1]), [(root, sent), (other, got)]))
    assert torch.equal(sent, got)


@pytest.fixture
def default_group() -> Iterator[Callable[[], None]]:
    def start() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))

    yield start
    dist.destroy_process_group()


def test_c3_a_group_formed_after_the_default_group_is_independent_of_it(default_group: Callable[[], None]) -> None:
    default_group()
    root, other = pair("after")
    assert (root.size, dist.get_world_size(), dist.get_backend()) == (2, 1, "gloo")
    assert_a_broadcast_passes(root, other)
    dist.barrier()


def test_c3_a_group_formed_before_the_default_group_is_independent_of_it(default_group: Callable[[], None]) -> None:
    root, other = pair("before")
    default_group()
    assert_a_broadcast_passes(root, other)
    dist.barrier()
    assert (root.size, dist.get_world_size(), dist.get_backend()) == (2, 1, "gloo")


def test_bf16_and_bytes_are_broadcast_too() -> None:
    root, other = pair("types")
    for tensor in (torch.randn(7).bfloat16(), torch.arange(9, dtype=torch.uint8)):
        got = torch.zeros_like(tensor)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda side: side[0].broadcast(side[1]), [(root, tensor), (other, got)]))
        assert torch.equal(tensor, got)


def test_a_group_that_is_never_complete_names_the_setting() -> None:
    store, address = host_store("127.0.0.1", 0, 1.0)
    with pytest.raises(SyncFailed, match=r"group lonely of 2 .* weights_sync\.sync_timeout_s = 1"):
        make_group(
            backend="gloo", store=store, prefix="lonely", rank=0, size=2, timeout_s=1.0, address=route_to(address)
        )


def test_c1_a_peer_that_does_not_take_part_ends_the_broadcast_at_its_deadline() -> None:
    root, _ = pair("silent", timeout_s=1.0)
    with pytest.raises(SyncFailed, match=r"rank 0 of 2.*weights_sync\.sync_timeout_s = 1"):
        root.broadcast(torch.zeros(1 << 22))


def test_the_store_listens_on_its_own_address_alone() -> None:
    _, address = host_store("127.0.0.1", 0, 5.0)
    port = int(address.rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # would be in use if the store listened on every address


def test_c113_a_busy_port_names_the_setting() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        pytest.raises(SyncFailed, match=r"weights_sync\.host / \.port"),
    ):
        host_store("127.0.0.1", busy.getsockname()[1], 5.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_c5_a_wildcard_is_refused_as_the_advertised_host(host: str) -> None:
    with pytest.raises(ValidationError, match="wildcard"):
        WeightsSyncConfig(host=host)


def test_c5_loopback_serves_a_generator_on_the_same_machine() -> None:
    check_reachable("127.0.0.1", "127.0.0.1")
    check_reachable("127.0.0.1", socket.gethostname())


def test_c6_a_name_that_resolves_to_loopback_is_refused_for_a_peer_elsewhere() -> None:
    addresses = {"learner": ["127.0.1.1"], "node7": ["203.0.113.7"]}  # TEST-NET-3: never one of ours
    with pytest.raises(SyncFailed, match=r"weights_sync\.host = learner is a loopback address .* node7"):
        check_reachable("learner", "node7", resolver=addresses.__getitem__)


def test_c6_a_routable_name_is_accepted_for_a_peer_elsewhere() -> None:
    addresses = {"learner": ["203.0.113.1"], "node7": ["203.0.113.7"]}
    check_reachable("learner", "node7", resolver=addresses.__getitem__)


def test_c6_a_list_of_interfaces_is_refused() -> None:
    with pytest.raises(ValidationError, match="one interface"):
        WeightsSyncConfig(interface="^lo")


def test_c6_the_address_that_routes_to_the_learner_is_chosen() -> None:
    assert route_to("127.0.0.1:4000") == "127.0.0.1"


def test_a_store_that_does_not_answer_names_the_setting() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(SyncFailed, match=r"weights_sync\.host"):
            join_store(f"127.0.0.1:{closed.getsockname()[1]}", 1.0)
