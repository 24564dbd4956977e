"""A TP profile as tables, for people."""

from rich.table import Table

from tailrace.errors import counted
from tailrace.planning.latency import prefill_errors
from tailrace.planning.tp_profile import ProfileKey, TPProfile
from tailrace.report.text import number


def title(key: ProfileKey) -> str:
    """Describe the measurement in a line."""
    link = f" · link of {key.link}" if key.link else ""
    threads = f"{counted(key.ranks, 'rank')} with {counted(key.threads_per_rank, 'thread')} each"
    engines = f"{key.engines} engines at the same time, each of " if key.engines > 1 else ""
    return f"{key.model} · {key.dtype} · {engines}{threads}{link} · {key.hardware} · {key.backend} · {key.collectives}"


def decode_table(profile: TPProfile) -> Table:
    """Return a table with a row for each batch and length, and a column for each degree and number of replicas side by
    side."""
    columns = sorted({(point.tp, point.replicas) for point in profile.decode})
    seconds = {(p.tp, p.replicas, p.batch_size, p.context_tokens): p.seconds for p in profile.decode}
    shown = _table("ms a decode step", "sequences", "tokens of each")
    for tp, replicas in columns:
        shown.add_column(f"TP {tp}" + (f" × {replicas}" if replicas > 1 else ""), justify="right")
    for size, tokens in sorted({(point.batch_size, point.context_tokens) for point in profile.decode}):
        times = (_ms(seconds.get((*column, size, tokens))) for column in columns)
        shown.add_row(f"{size:,}", f"{tokens // size:,}", *times)
    return shown


def prefill_table(profile: TPProfile) -> Table:
    """Return a table with a row for each batch and length, and a column for each degree."""
    seconds = {(p.tp, p.batch_size, p.length): p.seconds for p in profile.prefill}
    shown = _table("ms to prefill", "prompts", "tokens of each")
    for tp in profile.degrees:
        shown.add_column(f"TP {tp}", justify="right")
    for size, length in sorted({(point.batch_size, point.length) for point in profile.prefill}):
        shown.add_row(f"{size:,}", f"{length:,}", *(_ms(seconds.get((tp, size, length))) for tp in profile.degrees))
    return shown


def prefill_line(profile: TPProfile) -> str:
    """Say how far prefills are off that are predicted from all others."""
    errors = (f"{100 * error:.1f} % under TP {tp}" for tp, error in prefill_errors(profile).items())
    return f"predicted from the others, a prefill is off by {', '.join(errors) or 'a part that is not known'}"


def switch_table(profile: TPProfile) -> Table:
    """Return a table with a row for each pair of degrees."""
    shown = _table("ms to switch", "from", "to")
    for name in ("weights", "rest", "groups, once", "cache, MiB/s", "all-reduce, MiB/s"):
        shown.add_column(name, justify="right")
    for cost in profile.switches:
        rate = profile.collective_bytes_per_s.get(cost.target_tp)
        shown.add_row(
            f"TP {cost.source_tp}",
            f"TP {cost.target_tp}",
            _ms(cost.reshard_s),
            _ms(cost.rest_s),
            _ms(profile.group_s.get(cost.target_tp)),
            number(cost.kv_bytes_per_s / 2**20),
            "" if rate is None else number(rate / 2**20),
        )
    return shown


def _table(title: str, *keys: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    for key in keys:
        shown.add_column(key, style="dim", justify="right")
    return shown


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f}"
