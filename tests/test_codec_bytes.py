"""The shares of bytes that docs/codecs.md gives are those that examples/codec_bytes.py works out."""

import runpy
from pathlib import Path

from gsync.config import BLOCK_CODECS

ROOT = Path(__file__).resolve().parent.parent


def test_shares_in_the_document_are_those_of_the_script():
    script = runpy.run_path(str(ROOT / "examples" / "codec_bytes.py"))
    text = (ROOT / "docs" / "codecs.md").read_text()
    for label, shapes in (("GPT-2 small", script["gpt2_small"]()), ("ResNet-50", script["resnet50"]())):
        whole = script["payload_bytes"](shapes, "fp32")
        shares = {codec: script["payload_bytes"](shapes, codec) / whole for codec in ("bf16", *BLOCK_CODECS)}
        assert shares["fp8_e4m3"] == shares["fp8_e5m2"] == shares["int8"]
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
        millions, *cells = (cell.strip() for cell in row.strip("|").split("|")[1:])
        assert cells == [f"{shares[codec]:.3f}" for codec in ("bf16", "int8", "int4")]
        numel = sum(_product(shape) for shape in shapes.values())
        assert millions.split(",")[0] == f"{numel / 1e6:.2f}"


def _product(shape):
    return shape[0] * _product(shape[1:]) if shape else 1
