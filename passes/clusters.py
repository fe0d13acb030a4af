"""Clusters: blocks that run at the same time, and can wait for each other."""

from __future__ import annotations

MOST_BLOCKS = 8
"""Of a cluster: as many as every GPU with clusters can run, if it is no small share of one."""


def has_clusters(target: str) -> bool:
    """Whether a target has them: ``sm_90`` and newer."""
    return int(target.removeprefix("sm_").rstrip("a")) >= 90
