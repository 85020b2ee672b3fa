"""A simulated step as one HTML file that needs nothing else: hover tips, light and dark."""

from __future__ import annotations

from html import escape

from scheduler.simulate.chart import CRITICAL, KINDS, Chart, colour, told_s

_LEFT, _RIGHT, _WIDTH, _LANE, _GAP, _TOP = 150, 80, 1500, 22, 14, 30
_CELL = 18


def page(chart: Chart, *, title: str, subtitle: str) -> str:
    """The whole document."""
    return _DOCUMENT.format(
        title=escape(title),
        subtitle=escape(subtitle),
        style=_STYLE,
        script=_SCRIPT,
        legend=_legend(),
        gantt=_gantt(chart),
        cells=_cells(chart),
    )


def _ys(chart: Chart) -> list[int]:
    """The top of each lane, in pixels."""
    return [_TOP + number * _LANE + lane.stage * _GAP for number, lane in enumerate(chart.lanes)]


def _gantt(chart: Chart) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / (chart.x(chart.makespan_s) or 1.0)
    tops = _ys(chart)
    bottom = tops[-1] + _LANE

    def x(at_s: float) -> str:
        return f"{_LEFT + scale * chart.x(at_s):.2f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {bottom + 34}" role="img" aria-label="Gantt chart of the step">']
    parts += [_PATTERN]
    for stage in range(chart.stages):
        own = [top for top, lane in zip(tops, chart.lanes, strict=True) if lane.stage == stage]
        if own:
            height = own[-1] - own[0] + _LANE + 6
            hue = colour(stage, 0, "F")
            parts.append(
                f'<rect x="{_LEFT}" y="{own[0] - 3}" width="{_WIDTH - _LEFT - _RIGHT}" height="{height}" '
                f'fill="{hue}" opacity="0.10"/>'
                f'<text class="stage" x="{_WIDTH - _RIGHT + 8}" y="{own[0] + height / 2:.0f}" '
                f'style="fill:{hue}">'
                f"stage {stage}</text>"
            )
    for top, lane in zip(tops, chart.lanes, strict=True):
        parts.append(f'<text class="peer" x="{_LEFT - 8}" y="{top + 15}">{escape(_short(lane.peer))}</text>')
    for critical in (False, True):
        for way in chart.ways:
            if way.critical == critical:
                kind = "back " if way.backward else ""
                mark = "crit" if critical else ""
                parts.append(
                    f'<line class="way {kind}{mark}" data-m="{way.microbatch}" x1="{x(way.start_s)}" '
                    f'y1="{tops[way.source] + 11}" x2="{x(way.end_s)}" y2="{tops[way.target] + 11}"/>'
                )
    parts += [_bar(chart, number, tops, scale) for number in range(len(chart.bars))]
    parts += _axis(chart, bottom, scale)
    parts.append("</svg>")
    return "\n".join(parts)


def _bar(chart: Chart, number: int, tops: list[int], scale: float) -> str:
    bar = chart.bars[number]
    lane = chart.lanes[bar.lane]
    x = _LEFT + scale * chart.x(bar.start_s)
    width = max(0.6, scale * (chart.x(bar.end_s) - chart.x(bar.start_s)))
    inset = 2 if bar.kind in "FB" else 5
    top, height = tops[bar.lane] + inset, _LANE - 2 * inset
    hue = colour(lane.stage, lane.replica, bar.kind)
    rectangle = (
        f'<rect class="bar{" crit" if bar.critical else ""}" data-m="{bar.microbatch}" '
        f'data-t="{escape(chart.tell(bar))}" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" '
        f'fill="{hue}"/>'
    )
    if bar.kind in "WA":
        rectangle += (
            f'<rect class="hatch" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" '
            f'fill="url(#{bar.kind})"/>'
        )
    if bar.kind in "FB" and width > 13:
        rectangle += f'<text class="no" x="{x + width / 2:.2f}" y="{top + 13}">{bar.microbatch}</text>'
    return rectangle


def _axis(chart: Chart, bottom: int, scale: float) -> list[str]:
    """Ticks at round times until averaging begins, then its end."""
    ticks = [(at_s, f"{at_s:g}") for at_s in round_times(chart.computed_s)]
    if chart.makespan_s > chart.computed_s:
        scaled = "" if chart.squeeze == 1 else ", not to scale"
        ticks.append((chart.computed_s, f"{chart.computed_s:.3g}"))
        middle = _LEFT + scale * (chart.x(chart.computed_s) + chart.x(chart.makespan_s)) / 2
        note = f'<text class="tick" x="{middle:.1f}" y="{_TOP - 12}">averaging{scaled}</text>'
    else:
        note = ""
    ticks.append((chart.makespan_s, told_s(chart.makespan_s)))
    lines = [note]
    for at_s, label in ticks:
        x = _LEFT + scale * chart.x(at_s)
        lines.append(
            f'<line class="tick" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom + 6}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 22}">{label}</text>'
        )
    return lines


def round_times(until_s: float) -> list[float]:
    """Six to fifteen multiples of 1, 2 or 5 times a power of ten, up to a little before ``until_s``."""
    if until_s <= 0:
        return [0.0]
    step = 10.0 ** int(f"{until_s:e}".partition("e")[2]) / 10
    step *= next(factor for factor in (1, 2, 5, 10) if until_s / (step * factor) <= 15)
    return [round(number * step, 12) for number in range(int(0.96 * until_s / step) + 1)]


def _cells(chart: Chart) -> str:
    """A column for each microbatch, a row for each stage."""
    width = 70 + _CELL * len(chart.visits)
    parts = [
        f'<svg style="width:{width}px;height:{_CELL * chart.stages + 24}px" role="img" '
        'aria-label="stages that each microbatch visits and skips">'
    ]
    for stage in range(chart.stages):
        parts.append(f'<text class="peer" x="60" y="{_CELL * stage + 14}">stage {stage}</text>')
    for mb, lanes in enumerate(chart.visits):
        left = 70 + _CELL * mb
        for stage, number in enumerate(lanes):
            top = _CELL * stage + 1
            if number is None:
                parts.append(
                    f'<text class="skip" data-m="{mb}" data-t="microbatch {mb} skips stage {stage}" '
                    f'x="{left + 8}" y="{top + 12}">×</text>'
                )
                continue
            lane = chart.lanes[number]
            told = escape(f"microbatch {mb}\n{lane.peer}, stage {stage}")
            parts.append(
                f'<rect class="bar" data-m="{mb}" data-t="{told}" x="{left}" y="{top}" width="16" '
                f'height="16" fill="{colour(stage, lane.replica, "F")}"/>'
                f'<text class="no" x="{left + 8}" y="{top + 12}">{lane.replica}</text>'
            )
        if mb % 5 == 0:
            parts.append(f'<text class="tick" x="{left + 8}" y="{_CELL * chart.stages + 16}">{mb}</text>')
    parts.append("</svg>")
    return "\n".join(parts)


def _legend() -> str:
    parts = []
    for kind, name in KINDS.items():
        hatch = f'<rect width="22" height="12" fill="url(#{kind})"/>' if kind in "WA" else ""
        parts.append(
            f'<span><svg width="22" height="12"><rect width="22" height="12" fill="{colour(0, 0, kind)}"/>'
            f"{hatch}</svg> {name}</span>"
        )
    for mark, name in (("", "sent forward"), ("back", "sent back"), ("crit", "critical path")):
        parts.append(
            f'<span><svg width="22" height="12"><line class="way {mark}" x1="0" y1="6" x2="22" y2="6"/>'
            f"</svg> {name}</span>"
        )
    return "".join(parts)


def _short(peer: str) -> str:
    return peer if len(peer) <= 20 else f"..{peer[-16:]}"


_PATTERN = (
    '<defs><pattern id="W" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="#0006" stroke-width="1.6"/>'
    '</pattern><pattern id="A" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<circle cx="2.5" cy="2.5" r="0.9" fill="#0007"/></pattern></defs>'
)

_STYLE = """
:root{--ground:#fff;--ink:#1f2328;--faint:#6b7280;--line:#5a6270;--rule:#d5d9df;--crit:CRITICAL}
@media (prefers-color-scheme:dark){:root{--ground:#14171c;--ink:#e6e9ee;--faint:#9aa3b0;--line:#a5adb9;
--rule:#2d333c;--crit:#ff5d66}}
body{margin:24px;background:var(--ground);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:22px 0 6px}p{margin:0 0 10px;color:var(--faint)}
.legend span{display:inline-block;margin-right:18px;font-size:13px}.wide{overflow-x:auto}
.wide>svg{display:block;min-width:900px}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg text.peer{text-anchor:end}svg text.stage{font-weight:600}
svg text.tick{text-anchor:middle;fill:var(--faint);font-size:11px}
svg line.tick{stroke:var(--rule);stroke-width:1;stroke-dasharray:2 3}
svg text.no,svg text.skip{text-anchor:middle;font-size:10px;fill:#fff;pointer-events:none}
svg text.skip{fill:var(--faint);pointer-events:auto;cursor:default}
.bar{stroke:var(--ground);stroke-width:.5}.bar.crit{stroke:var(--crit);stroke-width:2}
.hatch{pointer-events:none}.way{stroke:var(--line);stroke-width:.8;opacity:.4;fill:none}
.way.back{stroke-dasharray:4 3}.way.crit{stroke:var(--crit);stroke-width:2.2;opacity:1}
.one .bar,.one .way,.one .hatch,.one .no,.one .skip{opacity:.12}
.one .me{opacity:1}
#tip{position:fixed;display:none;white-space:pre;background:var(--ink);color:var(--ground);padding:6px 9px;
border-radius:5px;font-size:12px;pointer-events:none;z-index:9}
""".replace("CRITICAL", CRITICAL).strip()

_SCRIPT = """
const tip=document.getElementById('tip'),body=document.body;
function leave(){tip.style.display='none';body.classList.remove('one');
document.querySelectorAll('.me').forEach(e=>e.classList.remove('me'))}
document.addEventListener('mouseover',e=>{leave();const at=e.target.closest('[data-t]');if(!at)return;
tip.textContent=at.dataset.t;tip.style.display='block';if(at.dataset.m<0)return;body.classList.add('one');
document.querySelectorAll('[data-m="'+at.dataset.m+'"]').forEach(e=>e.classList.add('me'))});
document.addEventListener('mousemove',e=>{const w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.min(e.clientX+14,innerWidth-w-8)+'px';
tip.style.top=(e.clientY+h+24>innerHeight?e.clientY-h-10:e.clientY+16)+'px'});
""".strip()

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
<div class="legend">{legend}</div>
<div class="wide">
{gantt}
</div>
<h2>Paths</h2>
<p>The replica of each stage that each microbatch visits, in send order; × is skipped. Point at one to
follow it.</p>
<div class="wide">
{cells}
</div>
<div id="tip"></div>
<script>
{script}
</script>
</body>
</html>
"""
