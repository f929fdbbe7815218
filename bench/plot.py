"""The transport's figures as a picture: what more stages cost, how many requests fit, and what a payload costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KIB = 1 << 10
_COLOURS = {"stock Celery": "#999999", "Python": "#1f77b4", "HTTP": "#d95f02"}


def draw(cells: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw cells as :func:`bench.report.median_cells` gives them; the suffix of ``out`` is the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, rate, size) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    time.set(title="1 client, 1 KiB per hop", ylabel="p50, ms")
    rate.set(title="64 clients, 1 KiB per hop", ylabel="requests/s")
    size.set(title="1 client, 3 stages", ylabel="p50, ms", xlabel="payload per hop", xscale="log")
    size.set_xticks([1, 1 << 10, 16 << 10], ["1 KiB", "1 MiB", "16 MiB"])
    size.minorticks_off()
    for axes in (time, rate):
        axes.set(xlabel="stages", xticks=(1, 2, 3))
    for path, colour in _COLOURS.items():
        for events in (False, True):
            mine = [cell for cell in cells if cell["path"] == path and cell["events"] == events]
            style = {"color": colour, "marker": "o", "linestyle": "--" if events else "-"}
            style["label"] = path + (" with -E" if events else "")
            small = [cell for cell in mine if cell["payload"] == KIB]
            _line(time, [c for c in small if c["clients"] == 1], "stages", "p50_ms", style)
            _line(rate, [c for c in small if c["clients"] == 64], "stages", "per_s", style)
            if path != "stock Celery":
                _line(size, [c for c in mine if c["clients"] == 1 and c["stages"] == 3], "payload", "p50_ms", style)
    time.legend(frameon=False)
    for axes in (time, rate, size):
        axes.set_ylim(bottom=0)
    figure.savefig(out, dpi=100)
    pyplot.close(figure)


def _line(axes: Any, cells: Sequence[Mapping[str, Any]], x: str, y: str, style: Mapping[str, str]) -> None:
    if cells:
        axes.plot([cell[x] / (KIB if x == "payload" else 1) for cell in cells], [cell[y] for cell in cells], **style)
