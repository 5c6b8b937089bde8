"""How a run's HTML page looks: in light and dark, on a narrow screen and on paper."""

from __future__ import annotations

PAGE_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--tint:#f4f6f8;--line:#d0d7de;
--bad:#a83f00;--warn:#7a5200;--good:#00694d;--link:#005a8c}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9da7b1;--paper:#0d1117;--tint:#161b22;--line:#3a424c;
--bad:#ff8b4d;--warn:#e9b949;--good:#3ddbac;--link:#7cc7f4}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:70rem;padding:1.5rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.3rem;margin:2.5rem 0 .75rem}
h3{font-size:1.05rem;margin:0 0 .5rem;overflow-wrap:anywhere}p{margin:.4rem 0}
code,td,tbody th{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.86rem}
code{overflow-wrap:anywhere}
a{color:var(--link)}:focus-visible{outline:3px solid var(--link);outline-offset:2px;border-radius:2px}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.25rem .5rem}
.defs{position:absolute}
.soft{color:var(--soft);overflow-wrap:anywhere}.verdict{font-size:1.15rem;font-weight:700}
.bad,.error>h3 .kind,td.error,tr.error td{color:var(--bad)}
.unsure,.warning>h3 .kind,td.warning,td.unknown{color:var(--warn)}
.good{color:var(--good)}
nav{display:flex;flex-wrap:wrap;gap:1.25rem;margin-top:.75rem;padding:.5rem 0;border-block:1px solid var(--line)}
article{background:var(--tint);border:1px solid var(--line);border-left:5px solid var(--bad);border-radius:6px;
padding:1rem 1.25rem;margin:0 0 1.25rem}
article.warning{border-left-color:var(--warn)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:.75rem 0}dt{color:var(--soft)}dd{margin:0}
figure{margin:.75rem 0;overflow-x:auto}figure svg{display:block;max-width:none}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .9rem .3rem 0;white-space:nowrap;
border-bottom:1px solid var(--line);vertical-align:top}
thead th{font-size:.9rem;color:var(--soft)}tbody th{font-weight:400}
details{border-bottom:1px solid var(--line);padding:.4rem 0}
summary{cursor:pointer;font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.9rem;overflow-wrap:anywhere}
@media print{:root{color-scheme:light;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--tint:#fff;--line:#d0d7de;
--bad:#a83f00;--warn:#7a5200;--good:#00694d;--link:#1b1f24}
nav,.skip{display:none}body{max-width:none;padding:0;font-size:11pt}figure,.wide{overflow:visible}
figure svg{max-width:100%;height:auto}
article,figure,tr{break-inside:avoid}th,td{white-space:normal}
details::details-content{content-visibility:visible;block-size:auto}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
""".strip()
