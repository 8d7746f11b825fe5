"""What a run says about itself: JSON lines, counters, its environment, its memory, progress."""

from rowmesh.observe.counters import CounterLog
from rowmesh.observe.environment import environment_report, environment_text
from rowmesh.observe.json_lines import JsonLines
from rowmesh.observe.memory import MemoryGauge
from rowmesh.observe.progress import PartsProgress, Progress

__all__ = [
    "CounterLog",
    "JsonLines",
    "MemoryGauge",
    "PartsProgress",
    "Progress",
    "environment_report",
    "environment_text",
]
