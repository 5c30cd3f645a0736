"""SyncConfig: what is accepted, and one clear error for everything else."""

import dataclasses
import pickle

import pytest
import torch

from gsync.config import BLOCK_CODECS, CODECS, SyncConfig, make_config
from gsync.layout import BLOCK_SIZES, CODEC_KINDS
from gsync.model import read_model


def test_defaults_are_the_documented_ones():
    config = SyncConfig()
    assert (config.codec, config.exchange, config.average, config.rounding) == ("bf16", "auto", True, "nearest")
    assert (config.seed, config.start_step, config.slice_mb) == (0, 0, 25.0)
    assert config.timeout_s is None and config.block_size is None and config.bucket_mb is None


def test_every_field_is_documented():
    text = SyncConfig.__doc__
    for field in dataclasses.fields(SyncConfig):
        assert f"\n        {field.name}: " in text, field.name


def test_is_frozen_and_picklable():
    config = SyncConfig(codec={"*.bias": "fp32", "*": "bf16"}, timeout_s=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.codec = "fp32"
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(SyncConfig()) == hash(SyncConfig())


def test_a_codec_mapping_is_copied():
    mapping = {"*": "bf16"}
    config = SyncConfig(codec=mapping)
    mapping["*"] = "nonsense"
    assert config.codec == {"*": "bf16"}
    assert SyncConfig(codec={"a": "fp32", "b": "fp32", "*": "fp16"}).codecs == ("fp32", "fp16")


BAD = [
    ({"codec": "fp31"}, ValueError, "codec='fp31' is unknown; expected one of 'fp32', 'fp16', 'bf16'"),
    ({"codec": "int7"}, ValueError, "'fp8_e4m3', 'fp8_e5m2', 'int8', 'int4'"),
    ({"codec": 16}, TypeError, "codec: expected one of"),
    ({"codec": {}}, ValueError, "the mapping is empty"),
    ({"codec": {"*": "fp31"}}, ValueError, "codec['*']='fp31' is unknown"),
    ({"codec": {3: "fp32"}}, TypeError, "name patterns"),
    ({"exchange": "ring"}, ValueError, "exchange='ring' is unknown"),
    ({"exchange": "hierarchical", "codec": "fp16"}, ValueError, "fp16 encodes a host's sum there"),
    ({"exchange": "hierarchical", "codec": "int8", "exempt_codec": "fp16"}, ValueError, "use bf16, or 'scatter_gather'"),
    ({"average": 1}, TypeError, "average: expected True or False, got 1"),
    ({"exchange": "all_reduce", "codec": "int8"}, ValueError, "libraries cannot sum int8 with their scales"),
    ({"exchange": "all_reduce", "codec": {"a": "bf16", "*": "int4"}}, ValueError, "libraries cannot sum int4"),
    ({"exchange": "all_reduce", "error_feedback": True}, ValueError, "under exchange='all_reduce' the library rounds the sums"),
    ({"block_size": 0}, ValueError, "block_size=0 is out of range; expected 32 to 4096"),
    ({"block_size": 96, "codec": "int8"}, ValueError, "block_size=96: expected a power of two from 32 to 4096"),
    ({"block_size": 8192, "codec": "int8"}, ValueError, "out of range"),
    ({"block_size": 256}, ValueError, "codec bf16 has no blocks"),
    ({"block_size": "a"}, TypeError, "block_size: expected an int"),
    ({"rounding": "up"}, ValueError, "rounding='up' is unknown"),
    ({"rounding": "stochastic", "codec": "fp32"}, ValueError, "codec fp32 does not round"),
    ({"seed": -1}, ValueError, "seed=-1 is out of range"),
    ({"seed": 7}, ValueError, "seed=7 cannot act with rounding='nearest'"),
    ({"seed": True}, TypeError, "seed: expected an int"),
    ({"error_feedback": True, "codec": "fp32"}, ValueError, "error_feedback=True cannot act: codec fp32 loses nothing"),
    ({"error_feedback": 1}, TypeError, "error_feedback: expected True or False"),
    ({"measure_every": 4, "codec": "fp32"}, ValueError, "measure_every=4 cannot act: codec fp32 loses nothing"),
    ({"measure_every": True}, TypeError, "measure_every: expected an int"),
    ({"measure_every": -1}, ValueError, "measure_every=-1 is out of range"),
    ({"exempt": ["*.bias"]}, ValueError, "and codec bf16 is none"),
    ({"exempt": "*.bias", "codec": "int8"}, TypeError, "exempt: expected name patterns in a list, or a callable"),
    ({"exempt": [3], "codec": "int8"}, TypeError, "exempt: expected name patterns (str), got 3"),
    ({"exempt": 3, "codec": "int8"}, TypeError, "got 3"),
    ({"exempt": (), "exempt_codec": "fp32", "codec": "int8"}, ValueError, "exempts nothing"),
    ({"exempt_codec": "fp32"}, ValueError, "exempts no parameter"),
    ({"exempt_codec": "int8"}, ValueError, "exempt_codec='int8' is unknown"),
    ({"start_step": 5}, ValueError, "acts with a block codec"),
    ({"start_step": -1}, ValueError, "out of range"),
    ({"bucket_mb": 0}, ValueError, "bucket_mb=0 is out of range"),
    ({"slice_mb": 0}, ValueError, "slice_mb=0 is out of range; expected a finite number above 0"),
    ({"slice_mb": float("nan")}, ValueError, "slice_mb=nan"),
    ({"slice_mb": "25"}, TypeError, "slice_mb: expected a number"),
    ({"backend": "cuda"}, ValueError, "backend='cuda' is unknown"),
    ({"transport": "mpi"}, ValueError, "transport='mpi' is unknown"),
    ({"timeout_s": 0}, ValueError, "timeout_s=0 is out of range"),
    ({"timeout_s": -3.0}, ValueError, "timeout_s=-3.0"),
    ({"stream_priority": 1}, ValueError, "stream_priority=1 is out of range"),
    ({"nccl_min_ctas": 0}, ValueError, "nccl_min_ctas=0 is out of range"),
    ({"nccl_max_ctas": 65}, ValueError, "expected 1 to 64"),
    ({"nccl_min_ctas": 8, "nccl_max_ctas": 4}, ValueError, "nccl_min_ctas=8 is above nccl_max_ctas=4"),
    ({"nccl_max_ctas": 4, "transport": "process_group"}, ValueError, "it cannot act with transport"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else None)
def test_wrong_values_are_refused_with_what_came_and_what_is_accepted(options, error, words):
    with pytest.raises(error) as caught:
        SyncConfig(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_field_is_refused_and_the_fields_are_listed():
    with pytest.raises(TypeError, match="compression"):
        SyncConfig(compression="bf16")
    with pytest.raises(TypeError, match="unknown option 'compression'; the fields of SyncConfig are codec, exchange"):
        make_config(None, {"compression": "bf16"})


def test_config_or_keywords_but_not_both():
    assert make_config(None, {"codec": "fp32"}) == SyncConfig(codec="fp32")
    assert make_config(SyncConfig("fp16"), {}) == SyncConfig("fp16")
    with pytest.raises(TypeError, match="not both"):
        make_config(SyncConfig(), {"codec": "fp32"})
    with pytest.raises(TypeError, match="expected a SyncConfig, got dict"):
        make_config({"codec": "fp32"}, {})


def test_each_codec_of_the_operations_is_accepted():
    assert set(CODECS) == set(CODEC_KINDS) and set(BLOCK_CODECS) == {name for name in CODECS if CODEC_KINDS[name] in BLOCK_SIZES}
    for codec in CODECS:
        assert SyncConfig(codec=codec).codecs == (codec,)


def test_auto_exchanges_as_the_codec_needs():
    for hosts, ranks, several in ((1, 4, "scatter_gather"), (4, 1, "scatter_gather"), (2, 2, "hierarchical")):
        assert SyncConfig("bf16").exchange_used(hosts, ranks) == "all_reduce"
        assert SyncConfig("fp16", rounding="stochastic", seed=1).exchange_used(hosts, ranks) == "all_reduce"
        assert SyncConfig("bf16", error_feedback=True).exchange_used(hosts, ranks) == several
        assert SyncConfig({"a": "int8", "*": "bf16"}).exchange_used(hosts, ranks) == several
        assert SyncConfig({"a": "int8", "*": "fp16"}).exchange_used(hosts, ranks) == "scatter_gather"
        assert SyncConfig("bf16", exchange="scatter_gather").exchange_used(hosts, ranks) == "scatter_gather"
        assert SyncConfig("bf16", exchange="hierarchical").exchange_used(hosts, ranks) == "hierarchical"


def test_patterns_of_exempt_are_copied():
    patterns = ["*.bias"]
    config = SyncConfig("int8", exempt=patterns, exempt_codec="fp32")
    patterns.append("nonsense")
    assert config.exempt == ("*.bias",)
    assert hash(config) == hash(SyncConfig("int8", exempt=("*.bias",), exempt_codec="fp32"))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.linear = torch.nn.Linear(4, 3)
        self.out = torch.nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight


def codecs(**options):
    model = read_model(Net(), SyncConfig(**options))
    return dict(zip(model.names, model.codecs, strict=True))


def test_who_is_exempt():
    default = {"words.weight": "bf16", "norm.weight": "bf16", "norm.bias": "bf16", "linear.bias": "bf16", "linear.weight": "int8"}
    assert codecs(codec="int8") == default
    assert codecs(codec="int8", exempt_codec="fp32") == {name: default[name].replace("bf16", "fp32") for name in default}
    assert codecs(codec="int8", exempt=()) == dict.fromkeys(default, "int8")
    assert codecs(codec="int4", exempt=["norm.*"], exempt_codec="fp16") == {
        name: "fp16" if name.startswith("norm") else "int4" for name in default
    }
    by_size = codecs(codec="int8", exempt=lambda name, parameter: parameter.numel() < 10 or name == "words.weight")
    assert {name for name, codec in by_size.items() if codec == "int8"} == {"linear.weight"}
    # Of a mapping, block codecs only.
    assert codecs(codec={"*.bias": "fp32", "*.weight": "fp8_e4m3"}) == {
        "words.weight": "bf16", "norm.weight": "bf16", "norm.bias": "fp32", "linear.bias": "fp32", "linear.weight": "fp8_e4m3",
    }  # fmt: skip
    net = Net()
    _, names, _, block_sizes = read_model(net, SyncConfig("int8", block_size=64)).columns()
    assert dict(zip(names, block_sizes, strict=True)) == {name: 64 if name == "linear.weight" else 0 for name in default}


def test_options_that_meet_no_parameter_are_refused():
    with pytest.raises(ValueError, match="exempt: pattern 'nothing' matches no parameter with a block codec"):
        codecs(codec="int8", exempt=["nothing"])
    with pytest.raises(ValueError, match=r"exempt: pattern 'norm\.bias' matches no parameter with a block codec"):
        codecs(codec={"*.bias": "fp32", "*": "int8"}, exempt=["norm.bias"])
    with pytest.raises(ValueError, match=r"every parameter of pattern '\*\.bias' is exempt from int8 .*exempt=\(\) exempts none"):
        codecs(codec={"*.bias": "int8", "*": "int8"})
    with pytest.raises(ValueError, match=r"every parameter of the model is exempt from int4; exempt=\(\)"):
        codecs(codec="int4", exempt=["*"])
    with pytest.raises(TypeError, match=r"exempt: expected True or False for parameter 'linear\.bias', got None"):
        codecs(codec="int4", exempt=lambda name, parameter: None)
