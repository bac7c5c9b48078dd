"""Timelines read back from what they write for Chrome's trace viewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.schedule.timeline import Lane, Span, Timeline

LANES: tuple[Lane, ...] = ("compute", "communication")
MICRO = 1e6


def timeline_from_chrome_trace(data: Mapping[str, Any]) -> Timeline:
    """Inverse of :meth:`Timeline.to_chrome_trace`, to the precision of its microseconds."""
    events = data["traceEvents"]
    stages = sum(event["name"] == "process_name" for event in events if event["ph"] == "M")
    spans = []
    memory: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
    for event in events:
        start = event.get("ts", 0.0) / MICRO
        if event["ph"] == "X":
            end = (event["ts"] + event["dur"]) / MICRO
            spans.append(Span(event["pid"], event["name"], event["cat"], start, end, LANES[event["tid"]]))
        elif event["ph"] == "C":
            memory[event["pid"]].append((start, event["args"]["bytes"]))
    recorded = tuple(map(tuple, memory)) if any(memory) else ()
    return Timeline(stages, tuple(spans), recorded, data["otherData"]["name"])
