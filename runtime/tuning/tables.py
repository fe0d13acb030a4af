"""What was found, on disk: for each kernel key the fastest point, in JSON that people can read.

::

    <cache>/tuned/<target>-<SMs>-<device>.json     the user's, written by the tuner
    moesaic/runtime/tuned/<target>-<SMs>.json      shipped, for cards of that target and as many multiprocessors

A lookup asks the user's table, then the shipped one; where both know nothing, the rule of ``specialize`` decides. A key
holds for its bucket of T and for no other. Of a table that was made elsewhere, or by another version of this file, one
warning says so, and nothing of it is used.

Many processes may write at once: a file is read, merged and renamed under a lock, and readers see it before or after.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.ir import environment
from moesaic.ir.errors import InputError
from moesaic.passes.kernel_key import KernelKey
from moesaic.passes.space import Point
from moesaic.runtime import folders, locks

SCHEMA = 1
"""Of the files. Raise it whenever the meaning of a field changes."""

SHIPPED = Path(__file__).resolve().parent.parent / "tuned"
"""The folder of shipped tables."""

_LOCK_SECONDS = 30.0
_log = logging.getLogger("moesaic.tuner")


@dataclass(frozen=True)
class CardName:
    """What a table calls the card its times were taken on; its rates are `passes.card`'s.

    Attributes:
        target: of the code.
        sms: multiprocessors.
        device: the name of the product; empty in what holds for all of that target with as many multiprocessors.
    """

    target: str
    sms: int
    device: str = ""

    @property
    def stem(self) -> str:
        """Of a file's name."""
        name = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"{self.target}-{self.sms}" + (f"-{name}" if name else "")


@dataclass(frozen=True)
class Entry:
    """What was found for a key.

    Attributes:
        point: the choices.
        us, default_us: microseconds of it and of the rule's point, timed in turn.
        tuned_at: T of the tensors they were timed on.
        trials: candidates that were tried, of so many `points`.
        complete: whether the search had the time to try as many as it wanted; if not, the next one goes on.
    """

    point: Point
    us: float
    default_us: float
    tuned_at: int
    trials: int
    points: int
    complete: bool = True


class Table:
    """Entries by key, and the file they come from."""

    def __init__(self, path: Path, card: CardName, entries: Mapping[KernelKey, Entry] | None = None) -> None:
        self.path = path
        self.card = card
        self.entries = dict(entries or {})

    @classmethod
    def load(cls, path: Path, card: CardName) -> Table:
        """The table of a file; an empty one where there is none.

        Raises:
            InputError: the file cannot be read, or was made elsewhere; says what was found, and what to do.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls(path, card)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the tuned table {path} cannot be read ({error}); remove it, or tune again") from None
        try:
            content = json.loads(text)
            environment_found, rows = content["environment"], content["entries"]
            schema = content["schema"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"the tuned table {path} is damaged; remove it, and tune again") from None
        wanted = {"target": card.target, "sms": card.sms} | ({"device": card.device} if card.device else {})
        found = {name: environment_found.get(name) for name in wanted}
        if schema != SCHEMA or found != wanted:
            raise InputError(
                f"the tuned table {path} is for {_shown(found)}, schema {schema}; this is {_shown(wanted)}, schema "
                f"{SCHEMA}: it is not used. Remove it, and tune again here"
            )
        entries = {}
        for row in rows:
            try:
                entries[KernelKey.parse(row)] = _parse_entry(row)
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(
                    f"the tuned table {path} has an entry that cannot be read ({error}); remove it, and tune again"
                ) from None
        return cls(path, card, entries)

    def text(self, about: Mapping[str, Any] | None = None) -> str:
        """The file."""
        rows = [{**key.as_dict(), **dataclasses.asdict(self.entries[key])} for key in sorted(self.entries)]
        card = {n: v for n, v in dataclasses.asdict(self.card).items() if v}
        head = {"schema": SCHEMA, "environment": {**card, **(about or {})}}
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        return json.dumps(head, indent=1)[:-2] + ',\n "entries": [\n' + lines + ("\n" if lines else "") + " ]\n}\n"

    def add(self, found: Mapping[KernelKey, Entry], about: Mapping[str, Any] | None = None) -> None:
        """Merges entries into the file; those of other processes stay. A file that cannot be used is put aside.

        Raises:
            OSError: the file cannot be written.
        """
        folders.make_private(self.path.parent)
        lock = locks.acquire(self.path.with_suffix(".lock"), _LOCK_SECONDS)
        try:
            try:
                entries = self.load(self.path, self.card).entries
            except InputError as problem:
                aside = self.path.with_suffix(f".refused-{int(time.time())}")
                os.replace(self.path, aside)
                _log.warning("%s; it is now %s", problem, aside.name)
                entries = {}
            self.entries = {**entries, **found}
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(self.text(about))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        finally:
            if lock is not None:
                lock.release()


class Tables:
    """The user's table and the shipped one for a card, as lookups see them."""

    def __init__(self, card: CardName, user: Path | None = None, shipped: Path | None = None) -> None:
        common = dataclasses.replace(card, device="")
        self.card = card
        self.user_path = user or _user_path(card)
        self.user = Table(SHIPPED, card) if self.user_path is None else _load_or_warn(self.user_path, card)
        self.shipped = _load_or_warn(shipped or SHIPPED / f"{common.stem}.json", common)

    def find(self, key: KernelKey) -> Entry | None:
        """The entry of exactly this key: the user's, else the shipped one."""
        return self.user.entries.get(key) or self.shipped.entries.get(key)

    def add(self, found: Mapping[KernelKey, Entry], about: Mapping[str, Any] | None = None) -> None:
        """Adds to the user's table; where the disk refuses, or is not to be used, for this process only."""
        if self.user_path is None:
            self.user.entries |= found
            return
        try:
            self.user.add(found, about)
        except OSError as error:
            self.user.entries |= found
            _log.warning("what was tuned is kept for this process only: %s: %s", self.user_path, error)


def _user_path(card: CardName) -> Path | None:
    """In the cache folder; None if there is none, or it is not to be used."""
    if environment.DISABLE_CACHE.get():
        return None
    try:
        return environment.cache_root() / "tuned" / f"{card.stem}.json"
    except RuntimeError:  # this user has no home
        return None


def _load_or_warn(path: Path, card: CardName) -> Table:
    try:
        return Table.load(path, card)
    except InputError as problem:
        _log.warning("%s", problem)
        return Table(path, card)


def _parse_entry(row: Mapping[str, Any]) -> Entry:
    point = row["point"]
    if not isinstance(point, dict) or not all(isinstance(v, str) for v in point.values()):
        raise ValueError(f"point must map names to text, found {point!r}")
    complete = row.get("complete", True)
    if not isinstance(complete, bool):
        raise ValueError(f"complete must be true or false, found {complete!r}")
    return Entry(
        point,
        us=float(row["us"]),
        default_us=float(row["default_us"]),
        tuned_at=int(row["tuned_at"]),
        trials=int(row["trials"]),
        points=int(row["points"]),
        complete=complete,
    )


def _shown(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())
