"""Folders that only their owner may write."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(folder: Path) -> None:
    """Makes a folder, and every missing folder above it, so that nobody else can read or write them."""
    # `Path.mkdir(parents=True)` applies its mode to the last level only.
    missing = [level for level in (folder, *folder.parents) if not level.exists()]
    for level in reversed(missing):
        level.mkdir(mode=0o700, exist_ok=True)


def distrust(folder: Path) -> str | None:
    """Why code found in an existing folder may not be run; None if it may. Raises `OSError` if there is none."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "it belongs to, or can be written by, somebody else, and code in it would be run"
    return None
