"""The ZeroMQ broker's memory on disk: the rows of the ledger in one SQLite file, in WAL mode.

After every turn of the server, and before it answers, the rows that changed are written in one transaction, with
``synchronous=FULL``: what a client was told survives SIGKILL and the loss of power. Members and the ends of leases are
not kept: within a heartbeat of the broker's return the members say themselves what they hold.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.codec import decode, encode
from broker.errors import BrokerError, Refused
from broker.folder import IN_USE, make_private
from broker.heads import BatchHead
from broker.items import Dead, Ended, Held
from broker.ledger import Ledger
from broker.messages import SCHEMA_VERSION, Frontier, Publication, Rules
from broker.pool import Grant, Item
from broker.rows import Rows

FILE = "ledger.sqlite"
_ANY_SIZE = 1 << 40  # what was written here is not limited again


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """What the ledger is beside its rows."""

    rules: Rules | None
    version: int
    incarnation: int
    finished: str
    revision: int
    token: str
    serial: int
    newest: Publication | None
    round: int
    frontier: Frontier
    fed: int
    durable: int
    unsaved: int
    durable_version: int
    forks: tuple[int, ...]
    requeued: tuple[int, ...]
    dead_counts: dict[str, int]
    events: dict[str, int]


class Store:
    """One ledger in one folder. ``load`` first, then ``commit`` after every change.

    Raises BrokerError when the file cannot be used: another broker holds it, it is not one of ours, the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._written: bytes = b""
        try:
            make_private(folder)
            self._path.touch(mode=0o600)  # SQLite gives its WAL the same mode
            self._sqlite = sqlite3.connect(self._path, timeout=5.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def load(self, ledger: Ledger, now: float) -> bool:
        """Fills a new ledger with what is stored, every lease renewed at ``now``; returns whether there was any.

        From here on the ledger keeps track of its changes.
        """
        try:
            self._prepare()
            stored = self._read(ledger)
        except (sqlite3.Error, Refused) as error:
            self.close()
            raise self._unusable(error) from error
        if stored:
            ledger.restored(now)
        for rows, _ in _tables(ledger).values():
            rows.keep_track()
        return stored

    def commit(self, ledger: Ledger) -> None:
        """Writes what changed since the last call; on the disk when this returns."""
        tables = _tables(ledger)
        scalars = encode(_scalars(ledger))
        if scalars == self._written and not any(rows.changed for rows, _ in tables.values()):
            return
        try:
            self._sqlite.execute("BEGIN IMMEDIATE")
            for name, (rows, hint) in tables.items():
                if rows.changed:
                    self._write(name, rows, hint)
            self._sqlite.execute("INSERT OR REPLACE INTO scalars VALUES (0, ?)", (scalars,))
            self._sqlite.execute("COMMIT")
        except (sqlite3.Error, ValueError, OverflowError, Refused) as error:
            raise self._unusable(error) from error
        self._written = scalars

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._sqlite.close()

    def _prepare(self) -> None:
        run = self._sqlite.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        run("BEGIN IMMEDIATE")  # fails here when another broker has the file
        (version,) = run("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise Refused(f"it was written with schema {version}, this broker writes {SCHEMA_VERSION}")
        run(f"PRAGMA user_version={SCHEMA_VERSION}")
        for name in (*_tables(Ledger()), "scalars"):
            run(f"CREATE TABLE IF NOT EXISTS {name} (key PRIMARY KEY, value BLOB NOT NULL)")
        run("COMMIT")

    def _read(self, ledger: Ledger) -> bool:
        row = self._sqlite.execute("SELECT value FROM scalars").fetchone()
        if row is None:
            return False
        _restore(ledger, decode(row[0], Scalars, max_bytes=_ANY_SIZE))
        for name, (rows, hint) in _tables(ledger).items():
            for key, value in self._sqlite.execute(f"SELECT key, value FROM {name} ORDER BY rowid"):
                rows[key] = value if hint is bytes else decode(value, hint, max_bytes=_ANY_SIZE)
        return True

    def _write(self, name: str, rows: Rows[Any, Any], hint: Any) -> None:
        assert rows.changed is not None
        there = [(key, rows[key]) for key in rows.changed if key in rows]
        gone = [(key,) for key in rows.changed if key not in rows]
        self._sqlite.executemany(f"DELETE FROM {name} WHERE key = ?", gone)
        self._sqlite.executemany(
            f"INSERT OR REPLACE INTO {name} VALUES (?, ?)",
            ((key, value if hint is bytes else encode(value, hint)) for key, value in there),
        )
        rows.changed.clear()

    def _unusable(self, error: Exception) -> BrokerError:
        in_use = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY  # the low byte of the kinds of it
        why = IN_USE if in_use else str(error)
        return BrokerError(f"the broker's state in {self._path} (broker.data_dir) cannot be used: {why}")


def _tables(ledger: Ledger) -> dict[str, tuple[Rows[Any, Any], Any]]:
    items, evaluation = ledger.items, ledger.evaluation
    return {
        "items": (items.pool.items, Item),
        "grants": (items.pool.grants, Grant),
        "held": (items.held, Held),
        "batches": (items.batches, BatchHead),
        "trained_at": (items.trained_at, int),
        "ended": (items.ended, Ended),
        "dead": (items.dead, Dead),
        "eval_items": (evaluation.pool.items, Item),
        "eval_grants": (evaluation.pool.grants, Grant),
        "answers": (evaluation.answers, bytes),
    }


def _scalars(ledger: Ledger) -> Scalars:
    items = ledger.items
    return Scalars(
        rules=ledger.rules,
        version=ledger.version,
        incarnation=ledger.incarnation,
        finished=ledger.finished,
        revision=ledger.revision,
        token=ledger.token,
        serial=ledger.serial,
        newest=ledger.newest,
        round=ledger.evaluation.version,
        frontier=items.frontier,
        fed=items.fed,
        durable=items.durable,
        unsaved=items.unsaved,
        durable_version=items.durable_version,
        forks=tuple(items.forks),
        requeued=tuple(sorted(items.requeued)),
        dead_counts=items.dead_counts,
        events=dict(items.events),
    )


def _restore(ledger: Ledger, scalars: Scalars) -> None:
    items = ledger.items
    ledger.rules, ledger.version, ledger.incarnation = scalars.rules, scalars.version, scalars.incarnation
    ledger.finished, ledger.revision, ledger.token = scalars.finished, scalars.revision, scalars.token
    ledger.serial, ledger.newest, ledger.evaluation.version = scalars.serial, scalars.newest, scalars.round
    items.frontier, items.fed, items.durable = scalars.frontier, scalars.fed, scalars.durable
    items.unsaved = scalars.unsaved
    items.durable_version, items.forks = scalars.durable_version, list(scalars.forks)
    items.requeued, items.dead_counts = set(scalars.requeued), dict(scalars.dead_counts)
    items.events.update(scalars.events)
