"""Results and flights in a SQLite file, or in memory.

A *flight* is a call in progress. Its owner holds a lease, which it renews while the call runs.

Invariants:

- At most one owner holds a live lease of a key.
- A flight whose lease has expired can be claimed by any caller, so a killed owner delays others by at most
  `FLIGHT_LEASE_S`.
- The failure of a flight is reported to those who waited for it, and to no later caller. If it is `NOT_SHARED`, they
  all make the call at once, and none of them owns a flight.
- The results never exceed the maximum size. The oldest are removed.

The caller passes the time, in seconds since 1970. A clock that is set back does not make a lease longer.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

FLIGHT_LEASE_S = 5.0
"""Lifetime of a lease."""
LOCK_TIMEOUT_S = 4.0
"""Time to wait for another process that writes to the file."""
OPEN_RETRY_INTERVAL_S = 0.02
OLD_FLIGHT_S = 3600.0
"""Age from which failures and leases of dead owners are removed."""
EVICTION_BATCH_ROWS = 64
IN_MEMORY = ":memory:"
NO_OWNER = ""
"""Owner of a call that is made without a flight."""
NOT_SHARED = ""
"""Failure of a flight whose call has ended, but without an outcome for those who waited for it."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    id INTEGER PRIMARY KEY, key TEXT UNIQUE, value BLOB, origin TEXT, stored_at REAL, size INTEGER);
CREATE TABLE IF NOT EXISTS flights (key TEXT PRIMARY KEY, owner TEXT, until REAL, failure TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (bytes INTEGER);
INSERT INTO usage SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM usage);
CREATE TRIGGER IF NOT EXISTS stored AFTER INSERT ON results BEGIN UPDATE usage SET bytes = bytes + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON results BEGIN UPDATE usage SET bytes = bytes - OLD.size; END;
"""


class StoredResult(NamedTuple):
    """A result in the store."""

    value: bytes
    """The encoded result."""
    origin: str
    """Id of the trajectory that made the call."""
    stored_at: float
    """Time at which the call ended."""


class Claim(NamedTuple):
    """Answer to a claim. If nothing is set, another call is in flight."""

    result: StoredResult | None = None
    """The result, if there is one."""
    is_owner: bool = False
    """True if the caller now owns the flight and must make the call."""
    failure: str | None = None
    """Infra fault of the flight for which the caller waited, or `NOT_SHARED` if the caller must make its own call."""


class ResultStore:
    """Results and flights.

    Args:
        path: File, or `IN_MEMORY`. Several processes of one machine may use the same file.
        exclusive: Let no other process open the file. Required on network file systems, where SQLite's processes
            cannot share memory.

    Raises:
        OSError: If the directory of the file cannot be created.
        sqlite3.Error: If the file cannot be opened or is not a database.
    """

    def __init__(self, path: str, *, exclusive: bool = False) -> None:
        if path != IN_MEMORY:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        ends = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                self._connection = _open(path, exclusive)
                break
            except sqlite3.OperationalError as error:
                # Of several processes that create a file at once, SQLite rejects some without waiting.
                if "locked" not in str(error) or time.monotonic() > ends:
                    raise
                time.sleep(OPEN_RETRY_INTERVAL_S)

    def claim(self, key: str, owner: str, now: float, *, ttl: float | None = None, waited: float = 0.0) -> Claim:
        """Return the result of a key, or claim the flight of the call.

        Args:
            key: The key.
            owner: Id of the caller.
            now: Current time.
            ttl: Age from which a result is not used any more.
            waited: Time for which the caller has waited for the flight of another owner.

        Returns:
            The result, the failure, or whether the caller owns the flight.
        """
        if (result := self._find(key, now, ttl)) is not None:
            return Claim(result)
        with self._transaction():
            if (result := self._find(key, now, ttl)) is not None:
                return Claim(result)
            row = self._connection.execute("SELECT until, failure FROM flights WHERE key = ?", (key,)).fetchone()
            if row is not None:
                until, failure = row
                if failure is not None and now - waited < until <= now:
                    return Claim(failure=failure)
                if failure is None and now < until <= now + FLIGHT_LEASE_S:
                    return Claim()
            self._connection.execute(
                "INSERT OR REPLACE INTO flights VALUES (?, ?, ?, NULL)", (key, owner, now + FLIGHT_LEASE_S)
            )
            return Claim(is_owner=True)

    def renew(self, keys: list[str], owner: str, now: float) -> None:
        """Renew the leases of flights that the owner still holds."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE flights SET until = ? WHERE key = ? AND owner = ? AND failure IS NULL",
                [(now + FLIGHT_LEASE_S, key, owner) for key in keys],
            )

    def land(self, key: str, owner: str, value: bytes, origin: str, now: float, *, max_bytes: int) -> None:
        """Store the result of a call, also if its lease has expired, and end its flight.

        Args:
            key: The key.
            owner: Owner of the flight, or `NO_OWNER`.
            value: The encoded result. If it is larger than `max_bytes`, it is not stored, and those who wait for the
                flight make their own calls.
            origin: Id of the trajectory that made the call.
            now: Current time.
            max_bytes: Maximum size of all results.
        """
        size = len(value) + len(key) + len(origin)
        with self._transaction():
            if size > max_bytes:
                self._fail(key, owner, now, NOT_SHARED)
                return
            self._connection.execute("DELETE FROM results WHERE key = ?", (key,))
            self._evict(max_bytes - size)
            self._connection.execute(
                "INSERT INTO results (key, value, origin, stored_at, size) VALUES (?, ?, ?, ?, ?)",
                (key, value, origin, now, size),
            )
            self._end(key, owner)

    def abandon(self, key: str, owner: str, now: float, failure: str | None = None) -> None:
        """End a flight without a result.

        Args:
            key: The key.
            owner: Owner of the flight.
            now: Current time.
            failure: Infra fault that is reported to those who wait for the flight, or `NOT_SHARED`. If None, one of
                them takes over the flight.
        """
        with self._transaction():
            if failure is None:
                self._end(key, owner)
            else:
                self._fail(key, owner, now, failure)

    def size(self) -> int:
        """Return the size of all results in bytes."""
        return int(self._connection.execute("SELECT bytes FROM usage").fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _find(self, key: str, now: float, ttl: float | None) -> StoredResult | None:
        query = "SELECT value, origin, stored_at FROM results WHERE key = ?"
        row = self._connection.execute(query, (key,)).fetchone()
        if row is None or (ttl is not None and now - row[2] >= ttl):
            return None
        return StoredResult(*row)

    def _end(self, key: str, owner: str) -> None:
        self._connection.execute("DELETE FROM flights WHERE key = ? AND owner = ? AND failure IS NULL", (key, owner))

    def _fail(self, key: str, owner: str, now: float, failure: str) -> None:
        self._connection.execute("DELETE FROM flights WHERE until < ?", (now - OLD_FLIGHT_S,))
        self._connection.execute(
            "UPDATE flights SET until = ?, failure = ? WHERE key = ? AND owner = ? AND failure IS NULL",
            (now, failure, key, owner),
        )

    def _evict(self, max_bytes: int) -> None:
        """Remove the oldest results until the others have at most `max_bytes`."""
        query = "DELETE FROM results WHERE id IN (SELECT id FROM results ORDER BY id LIMIT ?)"
        while self.size() > max_bytes and self._connection.execute(query, (EVICTION_BATCH_ROWS,)).rowcount:
            pass

    def _transaction(self) -> _Transaction:
        return _Transaction(self._connection)


def _open(path: str, exclusive: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA locking_mode = {'EXCLUSIVE' if exclusive else 'NORMAL'}")
        # A new file contains nothing to lose. On a slow disk, others would wait too long for each write to reach it.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(SCHEMA)
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class _Transaction:
    """A transaction that other writers wait for from its start. It is committed unless the block raises."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:  # SQLite itself ends it after some errors, such as a full disk
            self._connection.execute("ROLLBACK")
