"""What a step of GPT-2 small and of ResNet-50 weighs under each codec, as a share of fp32: `python examples/codec_bytes.py`.

The parameters are listed from the architectures as published, so that nothing has to be downloaded; exempt are those that
`SyncConfig` exempts by default: fewer than two dimensions, and embeddings. Bytes are those of `gsync.ops.payload_bytes`, for one
bucket and 8 ranks; what one rank sends is 2 (W-1)/W times that under every codec, so that the shares are those of the wire.
"""

import math

import gsync
from gsync.config import BLOCK_CODECS, CODECS

RANKS = 8

Shapes = dict[str, tuple[int, ...]]


def gpt2_small() -> Shapes:
    """Names and shapes of GPT-2 small: 12 layers of width 768, 50257 words (shared with the output), 1024 places."""
    width = 768
    shapes: Shapes = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[-1:]

    for layer in range(12):
        add(f"h.{layer}.ln_1", width)
        add(f"h.{layer}.attn.c_attn", width, 3 * width)
        add(f"h.{layer}.attn.c_proj", width, width)
        add(f"h.{layer}.ln_2", width)
        add(f"h.{layer}.mlp.c_fc", width, 4 * width)
        add(f"h.{layer}.mlp.c_proj", 4 * width, width)
    add("ln_f", width)
    return shapes


def resnet50() -> Shapes:
    """Names and shapes of ResNet-50 for 1000 classes."""
    shapes: Shapes = {}

    def convolution(name: str, out: int, inputs: int, size: int) -> None:
        shapes[f"{name}.weight"] = (out, inputs, size, size)
        shapes[f"{name}.norm.weight"], shapes[f"{name}.norm.bias"] = (out,), (out,)

    convolution("stem", 64, 3, 7)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            convolution(f"{name}.conv1", width, inputs, 1)
            convolution(f"{name}.conv2", width, width, 3)
            convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.shortcut", 4 * width, inputs, 1)
            inputs = 4 * width
    shapes["fc.weight"], shapes["fc.bias"] = (1000, inputs), (1000,)
    return shapes


def payload_bytes(shapes: Shapes, codec: str) -> int:
    """Bytes of a step's gradients under a codec and the default exemptions."""
    codecs = []
    for name, shape in shapes.items():
        is_exempt = codec in BLOCK_CODECS and (len(shape) < 2 or name in ("wte.weight", "wpe.weight"))
        codecs.append("bf16" if is_exempt else codec)
    return gsync.ops.payload_bytes([math.prod(shape) for shape in shapes.values()], codecs, None, RANKS, list(shapes))


def main() -> None:
    print(f"{'':12}" + "".join(f"{codec:>10}" for codec in CODECS))
    for name, shapes in (("GPT-2 small", gpt2_small()), ("ResNet-50", resnet50())):
        whole = payload_bytes(shapes, "fp32")
        print(f"{name:12}" + "".join(f"{payload_bytes(shapes, codec) / whole:10.3f}" for codec in CODECS))
        print(f"{'  million parameters':12} {sum(map(math.prod, shapes.values())) / 1e6:.2f}")


if __name__ == "__main__":
    main()
