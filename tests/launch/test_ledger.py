"""``slipstream ledger`` and ``slipstream requeue`` against a live broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from broker.config import BrokerConfig
from broker.connect import connect
from broker.contract import Broker
from broker.messages import Frontier, Member, MemberState, Prompt, Rules, Split
from broker.server import BrokerServer
from launch.cli import main


def prompt(position: int) -> Prompt:
    return Prompt(
        item=str(position),
        position=position,
        epoch=0,
        split=Split.TRAIN,
        token_ids=np.arange(3, dtype=np.int32),
        text="?",
        reference="!",
        n=1,
        temperature=1.0,
        max_tokens=4,
        seed=0,
    )


@pytest.fixture
def url() -> Iterator[str]:
    server, stop = BrokerServer(BrokerConfig()), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    yield server.url
    stop.set()
    thread.join(10)


@pytest.fixture
def client(url: str) -> Iterator[Broker]:
    """A run with three prompts, of which 0 and 1 have failed their only attempt."""
    client = connect(BrokerConfig(), url)
    rules = Rules(
        max_staleness=1,
        on_stale="mask",
        groups_per_step=2,
        max_attempts=1,
        lease_timeout_s=60.0,
        member_timeout_s=60.0,
        max_buffer_bytes=1 << 30,
    )
    client.open_run(rules=rules, version=0, frontier=Frontier())
    client.feed([prompt(position) for position in range(3)])
    for lease in client.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=2, wait_s=0):
        client.release(lease_id=lease.lease_id, error="the reward raised KeyError: 'x'")
    yield client
    client.close()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out + out.err


def test_the_books_with_their_fill_and_the_dead_with_their_errors_are_shown(
    url: str, client: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "ledger", f"broker.url={url}")
    assert code == 0
    assert "balanced: every one of 3 prompts" in text
    assert "0 bytes of 1.1 GB" in text
    code, text = run(capsys, "ledger", "--dead", f"broker.url={url}")
    assert code == 0
    assert text.count("KeyError: 'x'") == 2


def test_members_are_shown_in_the_state_that_the_broker_sees_them_in(
    url: str, client: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, version in (("fresh", 0), ("odd", 7)):
        client.report(
            Member(
                member_id=name,
                role="generator",
                state=MemberState.SERVING,
                policy_version=version,
                incarnation=0,
                host="h",
                pid=1,
            )
        )
    _, text = run(capsys, "ledger", f"broker.url={url}")
    rows = [line.strip("│ ").split() for line in text.splitlines()]
    assert ["fresh", "serving", "0"] in [[cell for cell in row if cell != "│"][:3] for row in rows]
    assert ["odd", "stale", "7"] in [[cell for cell in row if cell != "│"][:3] for row in rows]


def test_named_prompts_and_then_all_dead_ones_are_queued_again(
    url: str, client: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "requeue", "1", f"broker.url={url}")[0] == 0
    assert [one.item for one in client.dead_items()] == ["0"]
    code, text = run(capsys, "requeue", f"broker.url={url}", "1", "0", "77")
    assert code == 1
    assert "1 prompts are queued again" in text and "not known any more: 1, 77" in text
    client.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=0)
    assert run(capsys, "requeue", "--all-dead", f"broker.url={url}")[0] == 0
    assert client.state().counts.dead == {}


def test_watching_ends_with_the_run(url: str, client: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    client.finish("enough")
    assert run(capsys, "ledger", "--watch", f"broker.url={url}")[0] == 0


def test_the_dead_are_not_watched(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "ledger", "--watch", "--dead")


@pytest.mark.parametrize("words", [(), ("1", "--all-dead")])
def test_requeue_wants_to_know_what(words: tuple[str, ...], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "requeue", *words, f"broker.url={url}")
    assert code == 2
    assert "--all-dead" in text


STRANGE = "bad \udc00 \x1b[31m [/red] [bold]\nline"
SHOWN = r"bad \udc00 \x1b[31m [/red] [bold]\nline"


def test_texts_of_others_are_printed_and_never_obeyed(
    url: str, client: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for lease in client.lease(member_id="g", policy_version=0, incarnation=0, max_prompts=1, wait_s=0):
        client.release(lease_id=lease.lease_id, error=STRANGE)
    client.report(
        Member(
            member_id=STRANGE,
            role="generator",
            state=MemberState.SERVING,
            policy_version=0,
            incarnation=0,
            host="h",
            pid=1,
            error=STRANGE,
        )
    )
    code, text = run(capsys, "ledger", f"broker.url={url}")
    assert (code, text.count(SHOWN)) == (0, 2)
    code, dead = run(capsys, "ledger", "--dead", f"broker.url={url}")
    assert (code, dead.count(SHOWN.partition(r"\n")[0])) == (0, 1)
    (text + dead).encode()
    assert "\x1b[31m" not in text + dead


def test_what_is_no_item_is_refused_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "requeue", "1", "abc", "2.5", "broker.url=tcp://127.0.0.1:9")
    assert (code, "abc, 2.5: not an item number" in text) == (2, True)


@pytest.mark.parametrize("broker", ["tcp://nobody.invalid:1", "redis://:hunter2@nobody.invalid:1/0"])
def test_a_host_that_does_not_resolve_is_told_at_once(broker: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "ledger", f"broker.url={broker}", "broker.reconnect_timeout_s=600")
    assert (code, "nobody.invalid does not resolve" in text, "hunter2" in text) == (1, True, False)


def test_a_run_that_is_not_open_yet_and_one_that_has_finished_are_told_apart(
    url: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    assert "no run is open yet" in run(capsys, "ledger", f"broker.url={url}")[1]
    client: Broker = request.getfixturevalue("client")
    text = run(capsys, "ledger", f"broker.url={url}")[1]
    assert "no run is open" not in text and "finished" not in text
    client.finish("5 steps are done")
    assert "the run has finished: 5 steps are done" in run(capsys, "ledger", f"broker.url={url}")[1]
