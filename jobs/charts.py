"""Charts as inline SVG: no script, nothing from the network, values as the browser's own tooltips."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pygal
from pygal.etree import etree
from pygal.style import Style

Series = Mapping[str, Sequence[float]]

# pygal leaves an import hook behind that makes Python warn at each later import.
sys.meta_path[:] = [hook for hook in sys.meta_path if type(hook).__module__ != pygal.__name__]

_COMMON: Final = {
    "disable_xml_declaration": True,
    "js": [],
    "width": 900,
    "height": 300,
    "margin_bottom": 0,
    "legend_at_bottom": True,
    "truncate_label": -1,
    "max_scale": 7,
}
_LOOK: Final = {
    "background": "transparent",
    "plot_background": "transparent",
    "foreground": "#495057",
    "foreground_strong": "#212529",
    "guide_stroke_color": "#dee2e6",
    "major_guide_stroke_color": "#ced4da",
    "font_family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    "label_font_size": 13,
    "major_label_font_size": 13,
    "legend_font_size": 14,
    "opacity": ".85",
    "stroke_width": "2",
}


def line_chart(label: str, x: Sequence[str], series: Series, unit: str) -> str:
    """Temperatures, the warmer ones first."""
    style = Style(**_LOOK, colors=("#d9480f", "#1c7ed6"))
    return _render(pygal.Line(style=style, **_COMMON), label, x, series, unit)


def bar_chart(label: str, x: Sequence[str], series: Series, unit: str) -> str:
    """Amounts, from zero."""
    style = Style(**_LOOK, colors=("#0c8599",))
    return _render(pygal.Bar(style=style, show_legend=False, include_x_axis=True, **_COMMON), label, x, series, unit)


def _render(chart: Any, label: str, x: Sequence[str], series: Series, unit: str) -> str:
    # pygal's own id is random; a second run of a task shall write the same bytes.
    chart.uuid = "".join(letter if letter.isalnum() else "-" for letter in label.lower())
    chart.x_labels, chart.value_formatter = list(x), lambda value: f"{value:.4g} {unit}"
    for name, values in series.items():
        chart.add(name, list(values))
    chart.add_xml_filter(lambda root: _plain(root, label))
    return str(chart.render())


def _plain(root: Any, label: str) -> Any:
    # Without scripts pygal's tooltips are dead; a <title> in a mark is one that needs none.
    for part in (root, root.find("defs")):
        for script in [child for child in part if child.tag in ("script", etree.Comment)]:
            part.remove(script)
    for group in root.iter("g"):
        group.attrib.pop("id", None)  # the legends' ids would be twice on a page with two charts
        told = {child.get("class"): child.text for child in group if child.tag == "desc"}
        if told.get("value"):
            title = group.makeelement("title", {})
            title.text = ": ".join(filter(None, (told.get("x_label"), told["value"])))
            group.insert(0, title)
    root.find("title").text = label
    root.attrib.update({"role": "img", "aria-label": label})
    return root
