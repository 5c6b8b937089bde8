"""Record a walk through a dump as one animated SVG: python record.py DUMP -o walk.svg.

Each step is a key and what it shows. The viewer is the real one, driven by the keys; the frames are its own pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardviz.tui.app import ShardvizApp
from shardviz.tui.export import screen_svg

if TYPE_CHECKING:
    from textual.pilot import Pilot

WALK = (
    ("", "it opens on the tensor that is out of order, with the fix in green"),
    ("v", "v: where the placements claim each element is"),
    ("v", "v: where each element really is"),
    ("v", "v: the difference, 1→2: 1 should hold it, 2 does"),
    ("enter", "enter: into the map"),
    ("down", "arrows: who should hold this element, and who does"),
    ("plus", "+: closer, down to single ids"),
    ("4", "4: all findings; c copies the fix"),
)
SECONDS = 2.5
SIZE = (104, 36)
CAPTION = 44
"""Pixels above a frame for what was typed."""

VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')


IN_COLOR = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
"""What the viewer is to find, so that the recording has all colors, wherever it is made."""


async def frames(dump: Path) -> list[str]:
    """Walk through a dump, and return a picture after each key."""
    app, found = ShardvizApp(dump), []
    async with app.run_test(size=SIZE) as pilot:
        for key, _ in WALK:
            await pilot.press(*filter(None, [key]))
            found.append(await settled(pilot))
    return found


async def settled(pilot: Pilot[None]) -> str:
    """Wait until a picture of the viewer is as the one before it, however slow the machine is, and return it."""
    before, picture = None, ""
    while picture != before:
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        before, picture = picture, screen_svg(pilot.app)
    return picture


def animated(pictures: list[str]) -> str:
    """Show pictures one after the other in one SVG; where motion is not wanted, only the first."""
    width, height = map(float, VIEW_BOX.search(pictures[0]).groups())
    share = 100 / len(pictures)
    total = SECONDS * len(pictures)
    style = (
        "text.said{font:600 18px ui-monospace,Menlo,Consolas,monospace;fill:#e6edf3}.frame{visibility:hidden}"
        f"@media(prefers-reduced-motion:no-preference){{.frame{{animation:show {total}s step-end infinite}}}}"
        "@media(prefers-reduced-motion:reduce){.frame:first-of-type{visibility:visible}}"
        f"@keyframes show{{0%{{visibility:visible}}{share:.4g}%{{visibility:hidden}}}}"
    )
    parts = []
    for at, (picture, (_, said)) in enumerate(zip(pictures, WALK, strict=True)):
        inner = picture.replace("shardviz-", f"f{at}-").replace("<svg ", f'<svg y="{CAPTION}" ', 1)
        inner = inner.replace('class="rich-terminal"', f'width="{width}" height="{height}"', 1)
        text = f'<text class="said" x="16" y="28">{escape(said)}</text>'
        delay = f"animation-delay:{at * SECONDS - total * bool(at)}s"
        parts.append(f'<g class="frame" style="{delay}">{text}{inner}</g>')
    box = f'viewBox="0 0 {width} {height + CAPTION}"'
    back = f'<rect width="{width}" height="{height + CAPTION}" rx="8" fill="#0d1117"/>'
    about = "A walk through a dump in the viewer: " + "; ".join(said for _, said in WALK)
    title = f"<title>{escape(about)}</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{title}<style>{style}</style>{back}{"".join(parts)}</svg>\n'


def main() -> None:
    """Record a walk through the dump that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dump", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ.update(IN_COLOR)
    os.environ.pop("NO_COLOR", None)
    pictures = asyncio.run(frames(args.dump))
    args.output.write_text(animated(pictures), encoding="utf-8")
    print(f"wrote {args.output}: {len(pictures)} steps")


if __name__ == "__main__":
    main()
