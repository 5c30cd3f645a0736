"""The layout: both twins agree, shares cover every element once, areas never overlap, slices join up."""

import dataclasses
import random

import pytest
import torch

from gsync.layout import (
    ELEMENTWISE_BLOCK,
    KIND_FLAGS,
    KIND_PADDING,
    PAYLOAD_ALIGNMENT,
    SCALE_BYTES,
    TILE_ELEMENTS,
    Segment,
    build_layout,
    codes_bytes,
    hash64,
    shard_of,
    share_of,
)

SIZES = [0, 1, 255, 256, 257, 4095, 4096, 4097, 10007]


def random_segments(rng, one_codec):
    codec = rng.randrange(7)
    segments = []
    for _ in range(rng.choice([0, 1, 2, 5, 17])):
        numel = rng.choice([*SIZES, rng.randrange(40000)])
        kind = codec if one_codec else rng.randrange(7)
        block_size = 0 if kind < 3 else rng.choice([0, 32, 64, 256, 1024, 4096])
        segments.append(Segment(numel, rng.randrange(4), kind, rng.getrandbits(64), block_size))
    return segments


def cases():
    rng = random.Random(0)
    for case in range(300):
        num_slices = rng.choice([1, 1, 2, 3, 7])
        yield random_segments(rng, case % 2 == 0), rng.choice([1, 2, 3, 5, 8]), rng.randrange(num_slices), num_slices


def columns(segments):
    return [[getattr(s, field) for s in segments] for field in ("numel", "dtype", "codec", "name_hash")]


def test_native_layout_equals_the_python_one():
    native = pytest.importorskip("gsync._C", reason="built without the extension")
    for segments, num_chunks, slice_idx, num_slices in cases():
        ours = build_layout(segments, num_chunks, slice_idx, num_slices)
        theirs = native.layout(
            *columns(segments), num_chunks, slice_idx, num_slices, block_sizes=[s.block_size for s in segments]
        )
        assert [dataclasses.astuple(share) for share in ours.shares] == theirs.shares()
        assert ours.tile_table().tolist() == [list(tile) for tile in theirs.tiles()]
        assert list(ours.partials) == theirs.partials()
        assert list(ours.chunk_first_tile) == theirs.chunk_first_tile
        for field in ("payload_bytes", "chunk_bytes", "num_segments", "num_chunks", "num_partials", "num_tiles"):
            assert getattr(ours, field) == getattr(theirs, field), field


def test_native_hash_equals_the_python_one():
    native = pytest.importorskip("gsync._C", reason="built without the extension")
    for name in ["", "a", "layers.0.weight", "größe", "x" * 1000]:
        assert native.hash64(name) == hash64(name)
    assert hash64("foobar") == 0x85944171F73967E8  # published test vector of FNV-1a


def test_slices_cover_every_element_once_and_in_order():
    for segments, num_chunks, _, num_slices in cases():
        elements = [[] for _ in segments]
        partials = []
        for slice_idx in range(num_slices):
            layout = build_layout(segments, num_chunks, slice_idx, num_slices)
            for share in layout.shares:
                if share.segment >= 0:
                    elements[share.segment].append((share.element, share.element + share.numel, share.first_partial))
                    tiles = -(-share.numel // TILE_ELEMENTS)
                    partials.extend(range(share.first_partial, share.first_partial + tiles))
        for segment, runs in zip(segments, elements, strict=True):
            runs.sort()
            bounds = [0, *(end for _, end, _ in runs)]
            assert bounds[:-1] == [begin for begin, _, _ in runs]
            assert bounds[-1] == segment.numel
            assert [first for _, _, first in runs] == sorted(first for _, _, first in runs)
        assert sorted(partials) == list(range(layout.num_partials))


def test_areas_of_a_chunk_are_aligned_and_fill_it_without_overlap():
    for segments, num_chunks, slice_idx, num_slices in cases():
        layout = build_layout(segments, num_chunks, slice_idx, num_slices)
        assert layout.chunk_bytes % PAYLOAD_ALIGNMENT == 0
        for chunk in range(num_chunks):
            areas = []
            for share in layout.shares_of_chunks(chunk):
                assert share.chunk == chunk
                assert share.codes_offset % PAYLOAD_ALIGNMENT == 0
                width = share.block_size * share.numel if share.segment < 0 else codes_bytes(share.kind, share.numel)
                areas.append((share.codes_offset, -(-width // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT))
                if share.kind in SCALE_BYTES:
                    assert share.scales_offset % 4 == 0
                    num_blocks = -(-share.numel // share.block_size)
                    areas.append((share.scales_offset, num_blocks * SCALE_BYTES[share.kind] + share.scales_padding))
            end = 0
            for begin, num_bytes in sorted(areas):
                assert begin == end
                end += num_bytes
            assert end == layout.chunk_bytes


def test_ownership_depends_on_the_parameter_alone():
    segment = Segment(10007, 0, 2, hash64("layers.3.weight"))
    for num_chunks in (1, 2, 3, 5):
        alone = {s.chunk: (s.element, s.numel) for s in build_layout([segment], num_chunks).shares if s.segment == 0}
        others = [Segment(n, 0, 2, hash64(f"other.{n}")) for n in SIZES]
        bucket = build_layout([*others, segment], num_chunks)
        found = {s.chunk: (s.element, s.numel) for s in bucket.shares if s.segment == len(others)}
        assert found == alone


def test_shares_begin_at_blocks_and_rotate_with_the_name():
    num_chunks = 3
    for name_hash in range(6):
        layout = build_layout([Segment(10 * ELEMENTWISE_BLOCK, 0, 0, name_hash)], num_chunks)
        for share in layout.shares:
            if share.segment == 0:
                r = (share.chunk - name_hash) % num_chunks
                assert share.element == 10 * r // num_chunks * ELEMENTWISE_BLOCK


def test_share_of_is_what_the_chunk_holds():
    for segments, num_chunks, _, _ in cases():
        layout = build_layout(segments, num_chunks)
        for chunk in range(num_chunks):
            found = {s.segment: (s.element, s.numel) for s in layout.shares_of_chunks(chunk) if s.segment >= 0}
            for i, segment in enumerate(segments):
                element, numel = share_of(segment, chunk, num_chunks)
                assert element % segment.block == 0
                assert found.get(i, (element, 0)) == (element, numel)


def test_flags_have_the_codec_type_only_where_all_segments_share_it():
    same = build_layout([Segment(5, 0, 2, 1), Segment(7, 0, 2, 2)], 2)
    mixed = build_layout([Segment(5, 0, 2, 1), Segment(7, 0, 0, 2)], 2)
    for chunk in range(2):
        flags = same.shares_of_chunks(chunk)[0]
        assert (flags.kind, flags.flag_kind, flags.block_size, flags.numel) == (KIND_FLAGS, 2, 2, 2)
        flags = mixed.shares_of_chunks(chunk)[0]
        assert (flags.kind, flags.flag_kind, flags.block_size, flags.numel) == (KIND_FLAGS, 255, 1, 2)


def test_a_chunk_that_owns_nothing_is_flags_and_padding():
    layout = build_layout([Segment(256, 0, 0, 0)], 3)  # one block: it lies in one chunk only
    kinds = [[share.kind for share in layout.shares_of_chunks(chunk)] for chunk in range(3)]
    assert kinds.count([KIND_FLAGS, KIND_PADDING]) == 2
    assert kinds.count([KIND_FLAGS, 0, KIND_PADDING]) == 1
    assert sorted(share.numel for share in layout.shares if share.kind == KIND_PADDING) == [0, 1024, 1024]


def test_a_shard_holds_consecutive_elements_and_all_shards_all_of_them():
    for segments, _, slice_idx, num_slices in cases():
        for num_shards, chunks_per_shard in ((2, 2), (3, 2), (4, 1), (1, 5)):
            num_chunks = num_shards * chunks_per_shard
            for i, segment in enumerate(segments):
                runs = [shard_of(segment, shard, num_shards) for shard in range(num_shards)]
                assert sum(numel for _, numel in runs) == segment.numel
                for shard, (first, numel) in enumerate(runs):
                    chunks = range(shard * chunks_per_shard, (shard + 1) * chunks_per_shard)
                    shares = sorted(share_of(segment, chunk, num_chunks, num_shards) for chunk in chunks)
                    assert sum(held for _, held in shares) == numel
                    ends = [first, *(element + held for element, held in shares)]
                    assert all(element == end for (element, held), end in zip(shares, ends, strict=False) if held), (i, shares)
            layout = build_layout(segments, num_chunks, slice_idx, num_slices, num_shards)
            assert layout.held(0, is_shard=True) == [shard_of(segment, 0, num_shards) for segment in segments]


def test_one_shard_is_the_rule_without_shards():
    for segments, num_chunks, slice_idx, num_slices in cases():
        assert build_layout(segments, num_chunks, slice_idx, num_slices, 1) == build_layout(
            segments, num_chunks, slice_idx, num_slices
        )


def test_uncompressed_keeps_shares_and_flags_and_has_room_for_fp32():
    for segments, num_chunks, slice_idx, num_slices in cases():
        layout = build_layout(segments, num_chunks, slice_idx, num_slices)
        plain = layout.uncompressed
        assert len(plain.shares) == len(layout.shares)
        for chunk in range(num_chunks):
            end = 0
            for share, other in zip(layout.shares_of_chunks(chunk), plain.shares_of_chunks(chunk), strict=True):
                same = ("element", "first_partial", "name_hash", "segment", "chunk", "dtype", "flag_kind", "block_size")
                assert all(getattr(share, field) == getattr(other, field) for field in same)
                assert other.codes_offset == end
                width = other.block_size if other.kind == KIND_FLAGS else 1 if other.kind == KIND_PADDING else 4
                end += -(-width * other.numel // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
                if share.segment >= 0:
                    assert (other.kind, other.numel, other.scales_offset) == (0, share.numel, 0)
            assert end == plain.chunk_bytes


def test_tables_hold_the_shares_in_64_bytes_each():
    layout = build_layout([Segment(5000, 3, 1, 2**64 - 1), Segment(7, 0, 1, 5)], 2)
    table = layout.share_table()
    assert table.dtype == torch.int64 and table.shape == (len(layout.shares), 8)
    for row, share in zip(table.tolist(), layout.shares, strict=True):
        assert row[:5] == [share.element, share.numel, share.codes_offset, share.scales_offset, share.first_partial]
        assert row[5] % 2**64 == share.name_hash
        assert row[6] % 2**64 == (share.segment % 2**32) | share.chunk << 32
        assert row[7] == share.block_size | share.kind << 32 | share.dtype << 40 | share.flag_kind << 48
    assert build_layout([], 2).share_table().shape == (0, 8)


def test_offsets_beyond_two_to_the_31_are_exact():
    numel = 2**33 + 8
    layout = build_layout([Segment(numel, 0, 0, 0), Segment(3, 0, 0, 0)], 2)
    big = [share for share in layout.shares if share.segment == 0]
    assert sum(share.numel for share in big) == numel
    assert big[1].element == 2**32
    assert layout.chunk_bytes > 2**34
    small = next(share for share in layout.shares if share.segment == 1)
    assert small.codes_offset == 16 + 4 * big[small.chunk].numel
    native = pytest.importorskip("gsync._C", reason="built without the extension")
    theirs = native.layout([numel, 3], [0, 0], [0, 0], [0, 0], 2)
    assert [dataclasses.astuple(share) for share in layout.shares] == theirs.shares()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0), "num_chunks is 0, expected at least 1"),
        (([], 4, 0, 1, 3), "num_shards is 3, expected a divisor of num_chunks, 4"),
        (([], 1, 0, 0), "num_slices is 0, expected at least 1"),
        (([], 1, 2, 2), "slice_idx is 2, expected 0 to 1"),
        (([Segment(-1, 0, 0, 0)], 1), r"numels\[0\] is -1, expected 0 or more"),
        (([Segment(1, 0, 7, 0)], 1), r"codecs\[0\] is 7, expected"),
        (([Segment(1, 0, 2, 0, 64)], 1), r"block_sizes\[0\] is 64, expected 0 with a codec that has no scale"),
        (([Segment(1, 0, 5, 0, 48)], 1), r"block_sizes\[0\] is 48, expected 0 or a power of two from 32 to 4096"),
        (([Segment(1, 0, 5, 0, 8192)], 1), r"block_sizes\[0\] is 8192, expected 0 or a power of two from 32 to 4096"),
        (([Segment(1, 9, 0, 0)], 1), r"dtypes\[0\] is 9, expected"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_layout(*arguments)
    native = pytest.importorskip("gsync._C", reason="built without the extension")
    segments, *rest = arguments
    shards = {"num_shards": rest.pop()} if len(rest) == 4 else {}
    with pytest.raises(ValueError, match=message):
        native.layout(*columns(segments), *rest, block_sizes=[s.block_size for s in segments], **shards)
