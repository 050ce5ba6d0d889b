"""The style sheet of the pages: light, dark on a screen whose reader wants that, and paper.

An element that is drawn in a colour has the class of that colour, such as ``l1``, which sets the variable ``--c``.
"""

KINDS = ("l1", "l2", "l3", "plain")

STYLE = " ".join(f".{kind} {{ --c: var(--{kind}); }}" for kind in KINDS) + """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1c1d20; --soft: #5a5d66; --grid: #e3e4e8; --card: #ffffff;
  --l1: #0067ac; --l2: #c95f00; --l3: #00805c; --plain: #80838c; --good: #00704f; --bad: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root {
  --page: #15161a; --ink: #ececf0; --soft: #a6a9b4; --grid: #32343c; --card: #1c1e23;
  --l1: #62b4f0; --l2: #f2a654; --l3: #45cfa0; --plain: #90939e; --good: #4fd0a2; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 40px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; line-height: 1.3; margin: 0 0 2px; }
p { margin: 0 0 8px; }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 16px 18px;
  margin: 18px 0; }
.verdict.good strong { color: var(--good); } .verdict.bad strong, .problems { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 14px 0 0; }
.tiles dt { color: var(--soft); font-size: .85rem; } .tiles dd { margin: 0; font-size: 1.35rem; }
.answer { color: var(--ink); } .source { color: var(--soft); font-size: .85rem; margin: 10px 0 0; max-width: 75ch; }
.beside { display: flex; gap: 24px; align-items: flex-start; }
figure { margin: 0; flex: 1 1 0; min-width: 0; }
svg { display: block; width: 100%; max-width: 620px; height: auto; }
.table { flex: 0 0 372px; overflow-x: auto; max-width: 100%; }
.table table { width: 100%; } #settings .table { flex: none; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { text-align: right; padding: 3px 0 3px 12px; border-bottom: 1px solid var(--grid); font-weight: normal; }
th:first-child { text-align: left; padding-left: 0; } thead th { color: var(--soft); }
td { white-space: nowrap; } #settings td { white-space: normal; }
#settings td, #settings th { text-align: left; overflow-wrap: anywhere; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 6px 0 0;
  font-size: .85rem; color: var(--soft); }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; background: var(--c); }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.line.plain { stroke-dasharray: 6 4; }
footer { color: var(--soft); font-size: .85rem; }
@media (max-width: 900px) { .beside { flex-direction: column; } .table { flex: none; width: 100%; }
  figure { flex: none; width: 100%; } }
@media (max-width: 560px) { main { padding: 14px 10px 30px; } section { padding: 12px 12px; }
  th, td { padding-left: 8px; } table { font-size: .8rem; } }
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; }
  section { break-inside: avoid; border: 0; padding: 4px 0; margin: 10px 0; } #settings { break-inside: auto; }
  .beside { flex-direction: row; gap: 20px; } figure { flex: 0 0 350px; width: auto; }
  .table { flex: 0 0 270px; width: auto; overflow: visible; } #settings .table { flex: none; }
  table { font-size: .75rem; } th, td { padding: 1px 0 1px 8px; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }"""
