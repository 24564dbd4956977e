"""Tables of figures in a terminal."""

from rich.table import Table
from rich.text import Text


def figures_table(first: str, *others: str) -> Table:
    """Make a table without lines: names on the left in the column `first`, and figures in `others`."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(first)
    for column in others:
        table.add_column(Text(column), justify="right")  # a name of a file is no markup
    return table
