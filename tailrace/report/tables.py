"""Tables of figures in a terminal."""

from rich.table import Table


def figures_table(first: str, *others: str) -> Table:
    """Make a table without lines: names on the left in the column `first`, and figures in `others`."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table
