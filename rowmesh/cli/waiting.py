"""How threads of OpenMP wait between two operations, which they read when torch is imported: by sleeping.

They spin by default: on a machine that has something else to do, other programs and threads of the same rank wait for
the cores on which nothing is computed.
"""

from __future__ import annotations

import os

WAIT_POLICY = "OMP_WAIT_POLICY"
_OTHERS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_passively() -> None:
    """Has threads sleep while they wait, where the environment does not say how they do. Before torch is imported.

    Example:
        >>> wait_passively()
        >>> WAIT_POLICY in os.environ or any(name in os.environ for name in _OTHERS)
        True
    """
    if not any(name in os.environ for name in _OTHERS):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
