"""The demo's page: one self-contained HTML file with a table and four figures.

`python -m commlib.cli.demo.report FOLDER` writes it again from a folder's `results.json`.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from commlib.cli.demo import plots
from commlib.cli.demo.methods import OURS
from commlib.cli.demo.summary import Record, Summary, summarize

_FIGURES = (
    (
        "Loss against seconds",
        "What a user waits for: validation loss against the seconds spent in training steps. A dot "
        "marks the last step.",
        plots.loss_by_second,
    ),
    (
        "Loss against step",
        "What is learned: every method sees the same batches from the same weights. Exact methods "
        "lie on each other; the lines are drawn with different widths so that all can be seen.",
        plots.loss_by_step,
    ),
    (
        "Bytes per step",
        "What a rank sends, in one direction, for the embedding tables (log scale). No exact "
        "method that keeps whole tables on each rank can stay below the dashed line, on a "
        "point-to-point network; EmbRace keeps some columns on each, and does.",
        plots.bytes_by_step,
    ),
)
_SPLIT_CAPTION = (
    "Where the time goes, mean of the timed steps. Grey is computing, colour is "
    "communication that computing does not hide: <i>scan</i> finds and encodes rows, "
    "<i>exchange</i> moves them, <i>decode</i> puts them back, <i>wait</i> is the rest: dense "
    "parameters and slower ranks."
)


def write(results: dict[str, Any], out: Path) -> Path:
    """Writes `index.html`.

    Args:
        results: `source`, `link` and `records`, as in `results.json`.
        out: A folder that exists.

    Returns:
        The page's path.
    """
    page = out / "index.html"
    page.write_text(render(results), encoding="utf-8")
    return page


def render(results: dict[str, Any]) -> str:
    """Returns the page as HTML that needs no other file."""
    records: list[Record] = results["records"]
    summaries = summarize(records)
    style = resources.files("commlib.cli.demo").joinpath("report.css").read_text(encoding="utf-8")
    figures = [_figure(title, caption, draw(records)) for title, caption, draw in _FIGURES]
    figures.append(_figure("Time per step", _SPLIT_CAPTION, plots.split_by_method(summaries)))
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>commlib demo</title><style>{style}</style></head><body><main>",
            _header(summaries),
            f"<section>{_table(summaries)}</section>",
            f'<section class="figures">{"".join(figures)}</section>',
            _setup(results),
            "</main></body></html>",
        )
    )


def _header(summaries: Sequence[Summary]) -> str:
    by_name = {one.method: one for one in summaries}
    base = by_name.get("ddp")
    cards = []
    for name in OURS:
        one = by_name.get(name)
        if base is None or one is None:
            continue
        fewer = base.sparse_bytes / one.sparse_bytes
        loss = one.valid_loss - base.valid_loss
        cards.append(
            f'<article style="--tone: {plots.COLORS[name]}"><h2>{html.escape(one.title)}</h2><dl>'
            f"<div><dt>faster steps than DDP</dt><dd>{base.step_s / one.step_s:.1f}×</dd></div>"
            f"<div><dt>fewer embedding bytes</dt><dd>{fewer:.0f}×</dd></div>"
            f"<div><dt>difference in loss</dt><dd>{_signed(loss)}</dd></div></dl></article>"
        )
    return (
        "<header><p>commlib demo</p><h1>Moving only the rows that carry gradients</h1>"
        "<p class='lead'>A word-level language model whose parameters are almost all embedding "
        "rows, trained data-parallel. Only the way gradients are averaged differs.</p></header>"
        + (f'<section class="cards">{"".join(cards)}</section>' if cards else "")
    )


def _signed(loss: float) -> str:
    return "&lt; 0.001" if abs(loss) < 5e-4 else f"{loss:+.3f}".replace("-", "\N{MINUS SIGN}")


def _table(summaries: Sequence[Summary]) -> str:
    head = (
        "<tr><th>method<th>step, ms<th>p10 – p90<th>tokens/s<th>embedding MB/step<th>× bound"
        "<th>valid. loss<th>speed-up</tr>"
    )
    rows = []
    for one in summaries:
        color = plots.COLORS.get(one.method, "#2b2f36")
        cells = (
            f"{one.step_s * 1e3:.0f}",
            f"{one.step_p10_s * 1e3:.0f} – {one.step_p90_s * 1e3:.0f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.sparse_bytes / 1e6:.2f}",
            f"{one.over_bound:.2f}",
            f"{one.valid_loss:.4f}",
            "" if one.speedup is None else f"{one.speedup:.2f}×",
        )
        name = f'<i style="background: {color}"></i>{html.escape(one.title)}'
        rows.append(f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _figure(title: str, caption: str, svg: str) -> str:
    return f"<figure><h3>{title}</h3>{svg}<figcaption>{caption}</figcaption></figure>"


def _setup(results: dict[str, Any]) -> str:
    record = results["records"][0]
    settings = record["settings"]
    share = record["table_parameters"] / record["num_parameters"]
    link = "processes of one machine" if results["link"] == "none" else f"{results['link']} links"
    facts = {
        "text": results["source"],
        "ranks": f"{record['num_ranks']}, {link}",
        "tables": f"2 × {record['num_rows']:,} × {settings['dim']} ({share:.1%} of all parameters)",
        "batch": f"{settings['batch']} × {settings['length']} words and {settings['negatives']} "
        "sampled negatives per rank",
        "steps": f"{settings['steps']}, the first {settings['warmup_steps']} not timed",
        "optimizer": f"Adagrad, learning rate {settings['lr']}",
        "validation": f"{settings['eval_tokens']:,} words of other files, whole vocabulary",
        "bound": "D·w·(S + U(n−2)/n): what an exact method sends at least to keep replicas equal, "
        "per rank on average, where a rank touches S rows and all touch U",
    }
    items = "".join(f"<dt>{key}</dt><dd>{html.escape(value)}</dd>" for key, value in facts.items())
    return f'<section class="setup"><h3>What was run</h3><dl>{items}</dl></section>'


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder)
