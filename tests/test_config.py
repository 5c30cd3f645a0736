"""SyncConfig: what is accepted, and one clear error for everything else."""

import dataclasses
import pickle

import pytest

from gsync.config import CODECS, SyncConfig, make_config


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
    ({"codec": "int8"}, ValueError, "codec='int8' is not available in this version; accepted today: 'fp32'"),
    ({"codec": 16}, TypeError, "codec: expected one of"),
    ({"codec": {}}, ValueError, "the mapping is empty"),
    ({"codec": {"*": "fp31"}}, ValueError, "codec['*']='fp31' is unknown"),
    ({"codec": {3: "fp32"}}, TypeError, "name patterns"),
    ({"exchange": "ring"}, ValueError, "exchange='ring' is unknown"),
    ({"exchange": "hierarchical"}, ValueError, "not available in this version"),
    ({"average": 1}, TypeError, "average: expected True or False, got 1"),
    ({"block_size": 0}, ValueError, "block_size=0 is out of range; expected 1 to"),
    ({"block_size": 256}, ValueError, "codec bf16 has no blocks"),
    ({"block_size": "a"}, TypeError, "block_size: expected an int"),
    ({"rounding": "up"}, ValueError, "rounding='up' is unknown"),
    ({"rounding": "stochastic"}, ValueError, "not available in this version"),
    ({"seed": -1}, ValueError, "seed=-1 is out of range"),
    ({"seed": 7}, ValueError, "seed=7 cannot act with rounding='nearest'"),
    ({"seed": True}, TypeError, "seed: expected an int"),
    ({"error_feedback": True}, ValueError, "error_feedback=True is not available"),
    ({"exempt": ["*.bias"]}, ValueError, "and codec bf16 is none"),
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


def test_each_codec_of_this_version_is_accepted():
    for codec in CODECS:
        assert SyncConfig(codec=codec).codecs == (codec,)
