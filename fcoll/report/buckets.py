"""The gradient buckets of a step: when each is under way, and the parameters in it."""

from __future__ import annotations

import re

from fcoll.scheduling.timeline import Timeline
from fcoll.units import show_bytes, show_us, table

_BUCKET = re.compile(r"bucket_(\d+): (.+)")  # as a reducer names the part of the program
_HEAD = ("bucket", "bytes", "from", "to", "exposed", "parameters")


def buckets(line: Timeline, top: int = 20) -> list[str]:
    """A line for each bucket that the step sends, in the order of sending; none without any."""
    times = {span.collective: span for span in line.spans if span.stream != "compute"}
    rows = []
    for call in line.collectives:
        found = _BUCKET.fullmatch(call.module)
        span = times.get(call.id)
        if found is None or span is None:
            continue
        exposed = line.exposed_us.get(call.id, 0.0)
        shown = tuple(map(show_us, (span.start_us, span.end_us, exposed)))
        rows.append((found[1], show_bytes(call.bytes), *shown, found[2]))
    if not rows:
        return []
    more = [f"... and {len(rows) - top} more buckets"] if len(rows) > top else []
    return ["", *table([_HEAD, *rows[:top]], ">>>>><"), *more]
