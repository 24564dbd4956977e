"""What a run says of itself, each thing once: its events, metrics, Prometheus series, queue counts and files.

Whoever emits an event or shows a figure reads its name, title, unit and colour here. `docs/metrics.md` is written from
these registers by `tailrace.registers.reference`.
"""
