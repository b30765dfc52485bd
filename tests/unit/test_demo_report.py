"""From records to the numbers, the table and the page."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from commlib.cli import checkout
from commlib.cli.demo import report
from commlib.cli.demo.methods import dense_bytes, torch_sparse_bytes
from commlib.cli.demo.run import run_demo, summary_table
from commlib.cli.demo.settings import Settings
from commlib.cli.demo.summary import SPLIT, split_step, summarize
from commlib.cli.demo.touched import Touched
from commlib.cli.main import app


def record(method, step_s, sparse_bytes, **stats):
    """A run of 10 steps whose first is a slow one that no median may see."""
    settings = {**vars(Settings()), "steps": 10, "warmup_steps": 1}
    steps = [
        {
            "step": step,
            "step_s": step_s if step else 9.0,
            "forward_s": 0.01,
            "backward_s": step_s - 0.02,
            "optimizer_s": 0.01,
            "loss": 5.0 - step / 10,
            "sparse_bytes": sparse_bytes,
            "bound_bytes": 1e6,
            **stats,
        }
        for step in range(10)
    ]
    return {
        "method": method,
        "title": f"the {method} <method>",
        "num_ranks": 4,
        "settings": settings,
        "num_rows": 40_000,
        "num_samples": 16 * 32,
        "num_parameters": 21_000_000,
        "table_parameters": 20_480_000,
        "compute": {"step_s": 0.04, "forward_s": 0.008, "backward_s": 0.02},
        "steps": steps,
        "validation": [
            {"step": 0, "train_s": 0.0, "loss": 10.0},
            {"step": 10, "train_s": 10 * step_s, "loss": 4.5},
        ],
    }


@pytest.fixture
def results():
    records = [
        record("ddp", 0.6, 120e6),
        record("ddp-sparse", 0.1, 2e6),
        record("exact", 0.08, 1.02e6, scan_s=0.01, exchange_s=0.02, decode_s=0.005),
        record("sketch", 0.07, 0.3e6, scan_s=0.1, exchange_s=0.2, decode_s=0.1, omega=2.5),
        record("embrace-2d", 0.06, 0.6e6, embedding_wait_s=0.004),
    ]
    return {"source": "a & b", "link": "none", "records": records}


def test_summary(results):
    ddp, _, exact, sketch, _ = summarize(results["records"])
    assert ddp.step_s == 0.6
    assert ddp.speedup == 1
    assert ddp.tokens_per_s == pytest.approx(4 * 16 * 32 / 0.6)
    assert exact.speedup == pytest.approx(7.5)
    assert exact.over_bound == pytest.approx(1.02)
    assert sketch.valid_loss == 4.5


def test_speedup_needs_plain_ddp(results):
    assert summarize(results["records"][1:])[0].speedup is None


@pytest.mark.parametrize("idx", range(5))
def test_the_split_adds_up_to_the_step(results, idx):
    one = results["records"][idx]
    split = split_step(one)
    assert set(split) == set(SPLIT)
    assert sum(split.values()) == pytest.approx(one["steps"][-1]["step_s"])
    assert min(split.values()) >= 0


def test_the_split_keeps_measured_times_that_fit(results):
    split = split_step(results["records"][2])
    assert [split[key] for key in ("scan", "exchange", "decode")] == pytest.approx(
        [0.01, 0.02, 0.005]
    )
    assert split["wait"] == pytest.approx(0.005)


def test_the_split_sees_what_the_forward_pass_waits_for(results):
    split = split_step(results["records"][4])
    assert split["forward"] == pytest.approx(0.008)
    assert split["exchange"] == pytest.approx(0.004)
    assert split["wait"] == pytest.approx((0.01 - 0.008) + (0.04 - 0.02) - 0.004)


def test_the_page_is_whole_and_alone(results, tmp_path):
    page = report.write(results, tmp_path).read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [tmp_path / "index.html"]
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        ElementTree.fromstring(figure)
    for text in ("a &amp; b", "the exact &lt;method&gt;", "7.5×", "118×", "1.02"):
        assert text in page
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert all(target.startswith("#") for target in loaded)


def test_a_page_without_ddp_or_commlib(results, tmp_path):
    results["records"] = results["records"][1:2]
    assert "ddp-sparse" in report.write(results, tmp_path).read_text(encoding="utf-8")


def test_the_final_table(results):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(summarize(results["records"])))
    line = next(line for line in console.export_text().splitlines() if "exact" in line)
    assert line.split() == ["exact", "80", "25,600", "1.02", "1.02", "4.5000", "7.50x"]


def test_bytes_and_bound():
    touched = Touched(
        num_ranks=4, num_rows=1_000, row_bytes=64, mean_rows=10.0, max_rows=12, union_rows=30
    )
    assert touched.bound_bytes == 64 * (10 + 30 * 2 / 4)
    assert dense_bytes(touched) == 2 * 3 / 4 * 1_000 * 64
    assert torch_sparse_bytes(touched) == 3 * 12 * (64 + 8)


def test_settings_travel_as_json():
    settings = Settings(steps=7, lr=0.5)
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    "argv", [[], ["demo"], ["doctor"], ["bench"]], ids=lambda argv: " ".join(argv) or "top"
)
def test_help(argv):
    result = CliRunner().invoke(app, [*argv, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_an_unknown_method_is_named():
    result = CliRunner().invoke(app, ["demo", "--methods", "ddp,magic"])
    assert result.exit_code == 1
    assert "no method magic; there are ddp, ddp-sparse, exact, sketch" in " ".join(
        result.output.split()
    )


def test_an_unknown_benchmark_is_named():
    result = CliRunner().invoke(app, ["bench", "magic"])
    assert result.exit_code == 2
    assert "'magic'" in result.output


def test_without_a_checkout_bench_says_so(monkeypatch):
    monkeypatch.setattr(checkout, "root", lambda: None)
    with pytest.raises(ImportError, match="not part of the installed package"):
        checkout.import_bench("netlab")


@pytest.mark.dist
def test_two_ranks_train_the_same_with_dense_and_sparse_gradients(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for idx in range(40):
        (text / f"{idx}.txt").write_text(" ".join(f"w {'x' * (n % 9)} y" for n in range(60 + idx)))
    settings = Settings(
        steps=4, warmup_steps=1, batch=2, length=4, dim=8, hidden=8, negatives=8, eval_every=2
    )
    out = tmp_path / "report"
    records = run_demo(
        methods=["ddp", "ddp-sparse"],
        ranks=2,
        settings=settings,
        text=text,
        link="none",
        out=out,
        console=Console(file=io.StringIO()),
    )
    dense, sparse = ([step["loss"] for step in one["steps"]] for one in records)
    assert dense == pytest.approx(sparse, rel=1e-5)
    assert len(records[0]["validation"]) == 3
    assert json.loads((out / "results.json").read_text())["records"] == records
    assert (out / "index.html").is_file()
