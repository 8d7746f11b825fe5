"""Observation: a run's account of itself: JSON lines, counters, its environment, progress."""

from rowmesh.observe.counters import CounterLog
from rowmesh.observe.environment import environment_report, environment_text
from rowmesh.observe.progress import PartsProgress, Progress

__all__ = [
    "CounterLog",
    "PartsProgress",
    "Progress",
    "environment_report",
    "environment_text",
]
