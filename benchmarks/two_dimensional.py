"""Replica groups times shards: what they do for balance, for speed between hosts, and to accuracy.

    python -m benchmarks.two_dimensional --balance      most look-ups of a rank over the mean (Table 1)
    python -m benchmarks.two_dimensional --hosts 2x2    a step and its bytes between two hosts
    python -m benchmarks.two_dimensional --accuracy     what averaging costs in normalized entropy (Fig. 4)

Several may be asked for at once.
"""

from __future__ import annotations

from benchmarks.command import run_cases

CASES = {
    "balance": "benchmarks.two_dimensional_balance",
    "hosts": "benchmarks.two_dimensional_hosts",
    "accuracy": "benchmarks.two_dimensional_accuracy",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs what is asked for."""
    run_cases("two_dimensional", __doc__, CASES, arguments)


if __name__ == "__main__":
    main()
