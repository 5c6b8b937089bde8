"""The style sheet of SVG pictures, in light and in dark, and the hatch over what differs."""

from __future__ import annotations

from shardviz.picture.model.palette import HEAT_COLOURS, RANK_COLOURS, ink_on

FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def _coloured(ink: str, soft: str, paper: str, mixed: str, bad: str, good: str) -> str:
    """Return the rules that have colours, in plain ones: viewers and converters outside browsers know no variables."""
    return (
        f".sv text{{fill:{ink}}}.sv .sv-paper{{fill:{paper}}}.sv .sv-soft,.sv .sv-i{{fill:{soft}}}"
        f".sv .sv-bad{{fill:{bad}}}.sv .sv-good{{fill:{good}}}.sv .sv-fmixed{{fill:{mixed}}}"
        f".sv .sv-fnobody{{stroke:{soft}}}.sv .sv-hatch{{stroke:{ink}}}"
    )


STYLE = (
    f".sv{{font:12px {FONT}}}.sv text{{white-space:pre}}"
    ".sv .sv-name{font-size:16px}.sv .sv-name,.sv .sv-h,.sv .sv-bad,.sv .sv-good,.sv .sv-d{font-weight:700}"
    ".sv .sv-said{font-weight:400}"
    ".sv .sv-i,.sv .sv-l{text-anchor:middle}.sv .sv-l{font-size:13px}"
    ".sv .sv-start{text-anchor:start}.sv .sv-end{text-anchor:end}"
    ".sv .sv-fnobody{fill:none;stroke-dasharray:3 3}"
    ".sv .sv-hatch{fill:url(#sv-differs);stroke-width:2;pointer-events:none}"
    ".sv .sv-band{opacity:.5}.sv .sv-still{opacity:.18}"
    + _coloured("#1b1f24", "#57606a", "#fff", "#d0d7de", "#a83f00", "#00694d")
    + "@media screen and (prefers-color-scheme:dark){"
    + _coloured("#e6edf3", "#9da7b1", "#0d1117", "#4a525b", "#ff8b4d", "#3ddbac")
    + ".sv .sv-band{opacity:.75;stroke:#9da7b1}.sv .sv-still{opacity:.4}}"
    + "".join(
        f".sv .sv-f{at}{{fill:{colour}}}.sv .sv-t{at}{{fill:{ink_on(colour)}}}"
        for at, colour in (*enumerate(RANK_COLOURS), *((f"h{at}", colour) for at, colour in enumerate(HEAT_COLOURS)))
    )
)

PATTERN = (
    '<defs><pattern id="sv-differs" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V7" stroke="#000" stroke-opacity=".16" stroke-width="3"/>'
    '<path d="M3.5 0V7" stroke="#fff" stroke-opacity=".22" stroke-width="3"/></pattern></defs>'
)
