"""Retry: a store that goes away is asked again for a stated time, and then named in the error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rowmesh.errors import ConfigurationError, StoreError

logger = logging.getLogger("rowmesh")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """For how long, and how often.

    Attributes:
        for_s: seconds from the first failure to giving up; 0: at once.
        first_s: the first pause; each is twice the one before.
        longest_s: no pause is longer.

    Example:
        >>> Retry(for_s=5)(lambda: 7, lambda error: True, "a store")
        7
    """

    for_s: float = 30.0
    first_s: float = 0.05
    longest_s: float = 2.0

    def __post_init__(self) -> None:
        if not (self.for_s >= 0 and self.first_s > 0 and self.longest_s > 0):
            raise ConfigurationError(
                f"a store is retried for 0 seconds or more, with pauses above 0; got for_s={self.for_s}, "
                f"first_s={self.first_s}, longest_s={self.longest_s}"
            )

    def __call__(self, operation: Callable[[], Result], may_pass: Callable[[Exception], bool], name: str) -> Result:
        """Runs an operation until it succeeds.

        Args:
            operation: may run several times.
            may_pass: whether an error may go away; others are raised as they are.
            name: of the store, without its password.

        Raises:
            StoreError: time is up.
        """
        end_s, pause_s = None, self.first_s
        while True:
            try:
                return operation()
            except Exception as error:
                if not may_pass(error):
                    raise
                now_s = time.monotonic()
                if end_s is None:
                    end_s = now_s + self.for_s
                    logger.warning("%s does not answer, trying again for %g s: %s", name, self.for_s, error)
                if now_s >= end_s:
                    raise StoreError(
                        f"{name} did not answer for {self.for_s:g} s: {error}; start it again, or retry for longer"
                    ) from error
                time.sleep(min(pause_s, end_s - now_s))
                pause_s = min(2 * pause_s, self.longest_s)
