"""How a run's HTML page looks: in light and dark, on a narrow screen and on paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.model.palette import BLUE, GREEN, ORANGE, PURPLE, SKY

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_LIT = 64
"""Ranks below this light up with all that they have; each costs a rule."""

MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

PAGE_STYLE = f"""
:root{{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--tint:#f6f8fa;--line:#d0d7de;--edge:#b6bec7;
--bad:#a83f00;--warn:#7a5200;--good:#00694d;--link:#005a8c}}
@media (prefers-color-scheme:dark){{:root{{--ink:#e6edf3;--soft:#9da7b1;--paper:#0d1117;--tint:#161b22;--line:#2d343d;
--edge:#4a525b;--bad:#ff8b4d;--warn:#e9b949;--good:#3ddbac;--link:#7cc7f4}}}}
*{{box-sizing:border-box}}
html{{scroll-padding-top:3.5rem}}
body{{margin:0 auto;max-width:72rem;padding:1.5rem 1.5rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}}
h1{{font-size:1.75rem;line-height:1.25;margin:0;overflow-wrap:anywhere}}h2{{font-size:1.3rem;margin:2.75rem 0 .75rem}}
h3{{font-size:1.05rem;margin:1.25rem 0 .5rem;overflow-wrap:anywhere}}p{{margin:.4rem 0}}
code,tbody td,tbody th,.name{{font-family:{MONO};font-size:.86rem}}
code,.name{{overflow-wrap:anywhere}}
a{{color:var(--link)}}:focus-visible{{outline:3px solid var(--link);outline-offset:2px;border-radius:2px}}
.skip{{position:absolute;left:-999px}}.skip:focus{{left:1rem;top:.5rem;background:var(--paper);padding:.25rem .5rem;
z-index:2}}
.defs{{position:absolute}}
.unseen{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}}
.soft{{color:var(--soft)}}
.verdict{{font-size:1.15rem;font-weight:700;margin:.5rem 0 1rem}}
.bad,.error>h3 .kind,.sign.error,tr.error td{{color:var(--bad)}}
.unsure,.warning>h3 .kind,.sign.warning,.sign.unknown{{color:var(--warn)}}
.good{{color:var(--good)}}
header>p:first-child{{margin:0;letter-spacing:.04em}}
.facts{{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:0}}.facts dt{{font-size:.8rem}}
.facts dd{{overflow-wrap:anywhere}}
nav{{position:sticky;top:0;z-index:1;display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;margin-top:1.25rem;padding:.6rem 0;
border-block:1px solid var(--line);background:var(--paper)}}
nav a{{text-decoration:none}}nav a:hover{{text-decoration:underline}}
article{{background:var(--tint);border:1px solid var(--line);border-left:5px solid var(--bad);border-radius:8px;
padding:1rem 1.25rem;margin:0 0 1.25rem}}
article h3{{margin-top:0}}article h3 code{{font-size:1em}}article.warning{{border-left-color:var(--warn)}}
article>dl{{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:.75rem 0}}
dt{{color:var(--soft)}}dd{{margin:0}}
figure{{margin:.75rem 0;overflow-x:auto}}figure svg{{display:block;max-width:none}}
.wide{{overflow-x:auto;margin:.5rem 0}}
table{{border-collapse:collapse;min-width:min(100%,36rem)}}
th,td{{text-align:left;padding:.3rem 1.5rem .3rem 0;white-space:nowrap;border-bottom:1px solid var(--line);
vertical-align:top}}
th.number,td.number{{text-align:right}}
thead th{{font-size:.85rem;font-weight:600;color:var(--soft)}}tbody th{{font-weight:400}}
td:has(.bar){{width:14rem;padding-right:0}}
.bar{{display:flex;width:14rem;height:.9rem;margin-top:.25rem}}.bar span{{min-width:2px}}
.bar span+span{{border-left:1px solid var(--paper)}}
.key{{display:inline-block;width:.75rem;height:.75rem;margin-right:.4rem;vertical-align:-.05rem}}
.param{{background:{BLUE}}}.buffer{{background:{SKY}}}.grad{{background:{ORANGE}}}.optim{{background:{GREEN}}}
.activation{{background:{PURPLE}}}.this{{background:{BLUE}}}.scheme{{background:var(--edge)}}
.keys{{display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;font-size:.86rem;color:var(--soft)}}
.tree,.tree ul{{list-style:none;margin:0;padding:0}}.tree ul{{margin-left:.55rem;padding-left:1rem;
border-left:1px solid var(--line)}}
.tree{{border-top:1px solid var(--line)}}
summary{{cursor:pointer;border-radius:4px;padding:.25rem .4rem}}summary:hover{{background:var(--tint)}}
.tree summary{{display:flex;flex-wrap:wrap;gap:0 .75rem;align-items:baseline;list-style:none}}
.tree summary::-webkit-details-marker{{display:none}}
.tree summary::before{{content:"▸";content:"▸"/"";color:var(--soft);width:.7rem}}
.tree details[open]>summary::before{{content:"▾";content:"▾"/""}}
summary .soft{{font:.86rem system-ui,-apple-system,'Segoe UI',sans-serif}}
.tree .name{{flex:1 1 12rem}}.tree summary code{{flex:0 1 24rem}}.tree summary code+code{{flex:0 1 13rem;
font:.86rem {MONO}}}
.tree details:not(.leaf)>summary .name{{font-weight:600;flex:0 1 auto}}
.leaf[open]{{border-bottom:1px solid var(--line);padding-bottom:.75rem;margin-bottom:.5rem}}
.leaf>:not(summary){{margin-left:1.85rem}}
:target>summary,article:target{{outline:2px solid var(--link);outline-offset:2px}}
.sv-idle{{fill:none;stroke:var(--line);stroke-dasharray:3 3}}.sv-back{{fill:url(#sv-differs);pointer-events:none}}
.sv g>.sv-b{{transition:opacity .1s}}
.sv:has(g>.sv-b:hover) g:has(>.sv-b){{opacity:.35}}
figure .sv.sv g:hover:has(>.sv-b){{opacity:1}}
@media print{{:root{{color-scheme:light;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--tint:#fff;--line:#d0d7de;
--edge:#b6bec7;--bad:#a83f00;--warn:#7a5200;--good:#00694d;--link:#1b1f24}}
nav,.skip{{display:none}}body{{max-width:none;padding:0;font-size:11pt}}figure,.wide{{overflow:visible}}
figure svg{{max-width:100%;height:auto}}
article,figure,tr{{break-inside:avoid}}h2,h3,summary{{break-after:avoid}}th,td{{white-space:normal}}
details::details-content{{content-visibility:visible;block-size:auto}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}
""".strip()


def light_rules(ranks: Iterable[int]) -> str:
    """Return the rules by which a pointer over a part of a map lights up all that its ranks have."""
    lit = (rank for rank in ranks if rank < MOST_LIT)
    return "".join(f"figure .sv:has(.sv-r{rank}:hover) g.sv-r{rank}{{opacity:1}}" for rank in lit)
