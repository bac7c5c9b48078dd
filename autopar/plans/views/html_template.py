"""The jinja2 template of :mod:`autopar.plans.views.html`: one page, with its style sheet."""

from __future__ import annotations

PAGE = """\
{% macro module(row, times) %}
<details{% if is_open(row, times) %} open{% endif %}{% if not row.children and not row.moves %} class="leaf"{% endif %}>
<summary><b>{{ row.label }}</b>{% if row.count > 1 %} ×{{ row.count }}, each{% endif %}
{% if row.weight %}<span class="place">weight {{ row.weight }}</span>{% endif %}
{% if row.output %}<span class="place">output {{ row.output }}</span>{% endif %}
<span class="figure">{% if row.compute %}compute {{ row.compute | duration }}{% endif %}
{% if row.comm %}<i>comm {{ row.comm | duration }}</i>{% endif %}
{% if row.seconds %}{{ share(row, times) }}{% endif %}</span></summary>
{% for move in row.moves %}
<div class="move">↳ {{ move.what }} {{ move.way }}
{% if move.bytes %}{{ move.bytes | size }}{% else %}local{% endif %} ×{{ "%.3g" | format(move.count) }}
<span class="figure">{{ move.seconds | duration }}</span></div>
{% endfor %}
{% for child in row.children %}{{ module(child, times * row.count) }}{% endfor %}
</details>
{% endmacro %}
{% macro bar(parts, unit) %}
<div class="bar">{% for name, value, percent in parts %}<span class="part{{ loop.index }}"
 style="width:{{ "%.2f" | format(percent) }}%"
 title="{{ name }}"></span>{% endfor %}</div>
<ul class="key">{% for name, value, percent in parts %}<li><span class="part{{ loop.index }}"></span>{{ name }}
 {{ (value | duration) if unit == "s" else (value | size) }} ({{ "%.0f" | format(percent) }}%)</li>{% endfor %}</ul>
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ plan.model }}: plan</title>
<style>
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
.dim { color: var(--dim) } .place { font-family: ui-monospace, monospace; font-size: .85em; margin-left: .8em }
.figure { float: right; font-variant-numeric: tabular-nums } .figure i { color: #b60; font-style: normal }
details { margin-left: 1.1rem; border-left: 1px solid var(--line); padding-left: .4rem }
details.leaf > summary { list-style: none } summary { cursor: pointer; padding: .1rem 0 }
.move { margin-left: 1.5rem; color: #b60; font-size: .92em }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .2rem .8rem .2rem 0;
 border-bottom: 1px solid var(--line); vertical-align: top } td { font-size: .92em } code { font-size: .9em }
.bar { display: flex; height: 1.2rem; border-radius: .3rem; overflow: hidden } .bar span { display: block }
.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem }
.key span { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: .2em }
.part1 { background: #4878d0 } .part2 { background: #ee854a } .part3 { background: #6acc64 }
.part4 { background: #d65f5f }
.part5 { background: #956cb4 } .part6 { background: #8c613c } .part7 { background: #8888 } .warning { color: #b00 }
pre { overflow-x: auto; font-size: .8em }
</style>
</head>
<body>
<h1>{{ plan.model }}{% if plan.precision != "fp32" %}, {{ plan.precision }}{% endif %}</h1>
<p>mesh ({{ mesh }}), priced for {{ plan.cluster }} <span class="dim">({{ plan.cluster_source }})</span><br>
{{ plan.status }}{% if plan.gap < 1e9 %}, within {{ "%.2f" | format(100 * plan.gap) }}% of the best possible{% endif %};
 placements read ({{ plan.axis_names | join(", ") }}): S(d) shard dim d, R replicate, P partial</p>
{% for warning in plan.warnings %}<p class="warning">{{ warning }}</p>{% endfor %}
<h2>One step: {{ plan.predicted.step_seconds | duration }}</h2>
{{ bar(parts, "s") }}
{% if stages %}
<h2>Stages</h2>
<pre>{{ stages | join("\n") }}</pre>
{% endif %}
<h2>One device: {{ plan.predicted.peak_bytes | size }} of {{ plan.memory_limit | size }}</h2>
{{ bar(memory, "B") }}
{% if baselines %}
<h2>Also priced</h2>
<table>{% for name, figures in baselines %}<tr><td>{{ name }}</td><td>{{ figures }}</td></tr>{% endfor %}</table>
{% endif %}
<h2>Modules</h2>
<p class="dim">Forward and backward; figures include what is below; equal layers are folded.{% if stages %}
 Shares are of the time of all stages.{% endif %}</p>
{% for row in rows %}{{ module(row, 1) }}{% endfor %}
<h2>Parameters</h2>
<table><tr><th>parameter<th>type<th>weight<th>gradient<th>optimizer<th>why</tr>
{% for p in parameters %}
<tr><td><code>{{ p.path }}</code></td><td>{{ p.type }}</td><td>{{ p.weight }}</td><td>{{ p.gradient }}</td>
<td>{{ p.optimizer }}</td><td><details class="why"><summary>{{ p.reason }}</summary>
{% for other in p.others %}<div>{{ other.choice }}: {{ other.seconds | signed }}</div>{% endfor %}</details></td></tr>
{% endfor %}
</table>
{% for by, table in tables if table.rows %}
<h2>By {{ by }}</h2><pre>{{ table }}</pre>
{% endfor %}
<h2>As text</h2>
<pre>{{ text }}</pre>
</body>
</html>
"""
