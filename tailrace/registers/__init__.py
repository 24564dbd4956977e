"""The names of all that a run reports, each defined once: events, metrics, Prometheus series, queue counts and files.

Code that emits an event or shows a figure reads its name, title, unit and colour here. `docs/metrics.md` is written
from these registers by `tailrace.registers.reference`.
"""
