"""What every page with charts is rendered with. A page needs no network: plotly.js and all data are in it."""

from collections.abc import Iterable
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from tailrace.report.charts import Section


def environment() -> Environment:
    """Return the environment of the templates, with plotly.js."""
    made = Environment(
        loader=PackageLoader("tailrace.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["plotly_js"] = Markup(get_plotlyjs())
    return made


def as_json(value: Any) -> Markup:
    """Encode a value as JSON that can stand inside a script element."""
    text = msgspec.json.encode(value).decode()
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def charts_as_json(sections: Iterable[Section]) -> Markup:
    """Encode what plotly draws of the charts of some sections, by their ids."""
    figures = [figure for section in sections for figure in section.figures]
    return as_json({figure.id: {"data": figure.data, "layout": figure.layout} for figure in figures})
