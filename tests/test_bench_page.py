"""The page of results: whole by itself, readable where it is opened, and told off early where it cannot be written."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
from gsync.benchmarks import page, report, worker
from gsync.benchmarks.explain import explain
from gsync.benchmarks.options import Options

from gsync import _native

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), "")
BENCH = [sys.executable, "-m", "gsync.benchmarks.ddp"]
OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"}
GREYS = {"#ffffff", "#999999", "#dddddd"}


def made_up(name: str, family: str, ratio: float, **more: Any) -> dict[str, Any]:
    step = {"median": 10.0 * ratio, "p10": 9.0 * ratio, "p90": 12.0 * ratio, "samples": [10.0 * ratio] * 4}
    interval = [0.98 * ratio, 1.02 * ratio]
    spans = [
        ("forward", 0, 3),
        ("backward", 3, 9),
        ("pack", 5, 5.5),
        ("exchange", 5.5, 9),
        ("unpack", 9, 9.5),
        ("optimizer", 9.5, 10),
    ]
    return {
        "family": family,
        "name": name,
        "note": "",
        "step_ms": step,
        "step_ratio": {"median": ratio, "p10": ratio, "p90": ratio, "interval": interval},
        "wire_bytes": 4e6 * ratio,
        "exposed_ms": {"median": 5.0 * ratio, "p10": 4.0, "p90": 6.0},
        "error": 1e-3 * ratio,
        "loss": 0.5,
        "accuracy": 90.0,
        "train_losses": [2.0 / (step + 1) for step in range(20)],
        "one_step": [{"what": what, "begin_ms": begin, "end_ms": end} for what, begin, end in spans],
        **more,
    }


def results() -> dict[str, Any]:
    rows = [
        made_up("stock", "ddp", 1.0),
        made_up("stock again", "ddp", 1.01),
        {"family": "ddp", "name": "bf16 hook", "note": "", "refused": "TypeError: <needs> a GPU", "expected": True},
        made_up("PowerSGD", "ddp", 0.9, note="rank 4"),
        made_up("bf16 scatter_gather", "gsync", 0.6),
        {"family": "gsync", "name": "int4 scatter_gather", "note": "", "wrong": "off by 3", "error": 0.5},
        made_up("bf16 scatter_gather", "reducer", 0.5),
    ]
    machine = {"host": "here", "processor": "a <fast> one", "cores": 2, "memory_gib": 8.0, "gpus": [], "instructions": "AVX2"}
    return {
        "command": "gsync bench --model mlp & more",
        "commit": "0" * 40,
        "versions": {"gsync": "0.1.0", "torch": "2.13.0", "cuda": None},
        "machine": machine,
        "model": "mlp",
        "sizes": {"layers": 6, "width": 64},
        "hosts": 2,
        "rate": "1gbit",
        "steps": 4,
        "warmup": 2,
        "seed": 0,
        "threads": 1,
        "gsync_config": {"rounding": "stochastic"},
        "bucket_cap_mb": None,
        "gradient_as_bucket_view": False,
        "world_size": 2,
        "device": "cpu",
        "parameters": 1_234_567,
        "batch": 8,
        "no_sync_step_ms": {"median": 4.0, "p10": 3.0, "p90": 5.0, "samples": [4.0]},
        "rows": rows,
    }


def test_the_page_holds_what_was_found_and_needs_nothing_else():
    html = page.render(results())
    text = re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)
    for words in (
        "1.2 M parameters",
        "on 2 hosts with links of 1gbit",
        "The fastest is <strong>reducer bf16 scatter_gather</strong>: 0.500",
        "0.490 to 0.510",
        "took 1.010",
        "not run: TypeError: &lt;needs&gt; a GPU",
        "wrong, not timed: off by 3",
        "PowerSGD: rank 4",
        "gsync bench --model mlp &amp; more",
        "a &lt;fast&gt; one, 2 cores",
        "rounding stochastic",
        "0" * 40,
    ):
        assert words in " ".join(text.split()), words
    assert html.count("<svg") == 5
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html)  # xlink:href of a picture's own parts begins with #
    assert "<script" not in html and "@import" not in html and "url(http" not in html
    for width in ('name="viewport"', "@media print", "@media (max-width"):
        assert width in html
    identities = re.findall(r'\bid="([^"]*)"', html)
    assert len(identities) == len(set(identities))
    assert set(re.findall(r'xlink:href="#([^"]*)"', html)) | set(re.findall(r"url\(#([^)]*)\)", html)) <= set(identities)


def test_colours_are_safe_for_the_colour_blind():
    used = {
        colour.lower()
        for colour in re.findall(r"#[0-9a-fA-F]{6}\b", "".join(re.findall(r"<svg.*?</svg>", page.render(results()), re.DOTALL)))
    }
    assert used <= OKABE_ITO | GREYS and len(used & OKABE_ITO) >= 5


def test_a_run_without_pictures_of_a_step_has_a_page_too():
    plain = results()
    for row in plain["rows"]:
        row.pop("one_step", None)
        row.pop("accuracy", None)
        if "train_losses" in row:
            row["train_losses"] = [1.0]
    html = page.render(plain)
    assert html.count("<svg") == 3 and "Overlap" not in html and "Training" not in html


@pytest.mark.parametrize("width", [1000, 360])
def test_a_browser_shows_it(width: int, tmp_path: Path):
    if not BROWSER:
        pytest.skip("no chromium here")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},3000"]
    html, shot, frame = page.render(results()), tmp_path / "shot.png", tmp_path / "frame.html"
    (tmp_path / "page.html").write_text(html)
    command = [BROWSER, *options, f"--screenshot={shot}", (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert "CONSOLE" not in shown.stderr, shown.stderr[-2000:]  # errors and warnings of the page
    picture = shot.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", picture[16:24]) == (width, 3000)
    assert len(picture) > 50_000  # an empty page has a tenth
    # In a frame, since a window is never as narrow as a phone.
    tell = "document.title = [contentDocument.documentElement.scrollWidth, contentWindow.innerWidth].join(' ')"
    size = f'style="width:{width}px;height:3000px;border:0"'
    frame.write_text(f'<title></title><iframe {size} onload="{tell}" srcdoc="{escape(html)}"></iframe>')
    command = [BROWSER, *options, "--dump-dom", frame.as_uri()]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    (scroll_width, inner_width) = map(int, re.findall(r"<title>(\d+) (\d+)</title>", told)[0])
    assert scroll_width <= inner_width == width  # nothing to scroll to the side


def test_a_run_writes_it(tmp_path: Path):
    folder = tmp_path / "new" / "report"
    model = ["--model", "digits-mlp", "--width", "32", "--steps", "6", "--warmup", "2", "--quiet"]
    rivals = ["--rival", "gsync", "--codec", "bf16", "--exchange", "scatter_gather"]
    done = subprocess.run([*BENCH, *model, *rivals, "--report", str(folder)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in folder.iterdir()) == ["index.html", "results.json"]
    found = json.loads((folder / "results.json").read_text())
    stock, gsync = found["rows"]
    assert len(stock["train_losses"]) == 6
    for row in (stock, gsync):
        spans = row["one_step"]
        assert {"forward", "backward", "optimizer", "exchange"} <= {span["what"] for span in spans}
        backward, wait = (next(span for span in spans if span["what"] == what) for what in ("backward", "wait"))
        assert backward["end_ms"] == wait["begin_ms"]
        for span in spans:
            assert 0 <= span["begin_ms"] <= span["end_ms"]
            if span["what"] in ("pack", "exchange", "unpack"):  # all of it happens while backward is under way
                assert backward["begin_ms"] <= span["begin_ms"] and span["end_ms"] <= wait["end_ms"] + 1.0
    if _native.C is not None:  # the engine in Python works in a thread that the profiler does not see
        assert {"pack", "unpack"} <= {span["what"] for span in gsync["one_step"]}
    explained = gsync["explained"]
    assert "explained" not in stock
    assert explained["step_ms"] > explained["exposed_ms"] > 0 and 0.2 < explained["explained_share"] < 1.01  # steps of 5 ms
    assert 0.2 < explained["stages_share"] <= 1.0 and 0 <= explained["counting_share"] < 0.01
    assert "bf16 scatter_gather" in (folder / "index.html").read_text()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", "there is a file of that name; expected a folder"),
        ("file/below", "cannot be written: "),
        ("/proc/report", "cannot be written: "),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(place: str, message: str, tmp_path: Path):
    from gsync.benchmarks.ddp import make_app
    from typer.testing import CliRunner

    (tmp_path / "file").write_text("")
    outcome = CliRunner().invoke(make_app(), ["--report", str(tmp_path / place)])
    assert outcome.exit_code == 2 and f"--report {tmp_path / place}: {message}" in outcome.output, outcome.output


@pytest.mark.parametrize(
    "command", [[], ["kernels"], ["error"], ["convergence"]], ids=["bench", "kernels", "error", "convergence"]
)
@pytest.mark.parametrize(("place", "message"), [("nowhere/a.json", "there is no folder"), (".", "is a folder")])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(command: list[str], place: str, message: str, tmp_path: Path):
    from gsync.benchmarks.ddp import make_app
    from typer.testing import CliRunner

    outcome = CliRunner().invoke(make_app(), [*command, "--json", f"{tmp_path}/{place}"])
    assert outcome.exit_code == 2 and "--json" in outcome.output and message in outcome.output, outcome.output


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_extra_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=f"--report needs {missing}: pip install {missing}"):
        page.check(str(tmp_path))


def test_what_cannot_be_written_in_the_end_is_told_and_the_rest_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "report" / "results.json").mkdir(parents=True)
    options = Options(json=str(tmp_path / "a.json"), report=str(tmp_path / "report"))
    assert not worker._write(results(), options)
    assert f"gsync bench: {tmp_path / 'report'} was not written: Is a directory" in capsys.readouterr().err
    assert json.loads((tmp_path / "a.json").read_text())["model"] == "mlp"
    assert not (tmp_path / "report" / "index.html").exists()
    assert not report.save(results(), str(tmp_path / "report"), "gsync bench kernels")
    assert "gsync bench kernels: " in capsys.readouterr().err


def test_parts_of_a_step_are_read_from_a_timeline():
    """Two steps of 10 ms: 2 forward and loss, 3 backward, 4 exposed with a gap of 1 in the stages, 0.5 optimizer."""
    events = []
    for begin in (0, 20_000):
        for name, start, end in (
            ("forward", 0, 1_500),
            ("backward", 2_000, 5_000),
            ("wait for the mean", 5_000, 9_000),
            ("pack bucket 0", 4_000, 5_000),
            ("exchange bucket 0", 4_500, 7_000),
            ("unpack bucket 0", 8_000, 9_000),
        ):
            events.append({"ph": "X", "pid": 0, "name": name, "ts": begin + start, "dur": end - start})
            events.append({"ph": "X", "pid": 1, "name": name, "ts": begin, "dur": 7})
    found = explain({"traceEvents": events}, [10.0, 10.0], [0.5, 0.5])
    parts = [found[f"{name}_ms"] for name in ("forward", "backward", "exposed", "optimizer", "step")]
    assert parts == [2.0, 3.0, 4.0, 0.5, 10.0] and found["explained_share"] == 0.95
    assert found["stages_share"] == 0.75 and found["overlap_share"] == 0.25
    assert explain({"traceEvents": events}, [10.0] * 3, [0.5] * 3) == {}
