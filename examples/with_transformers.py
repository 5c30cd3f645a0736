"""Trains a small vision transformer on handwritten digits by the Trainer of transformers, gradients synchronised by gsync.

    torchrun --nproc-per-node 2 examples/with_transformers.py
    torchrun --nproc-per-node 2 examples/with_transformers.py --resume runs/transformers/checkpoint-180

Needs transformers, Accelerate and scikit-learn (pip install transformers accelerate scikit-learn); nothing is downloaded, the
model starts from random weights.
"""

from __future__ import annotations

import argparse

import digits
import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from gsync.integrations.transformers import GsyncCallback


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers on scikit-learn's handwritten digits, synchronised by gsync")
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--folder", default="runs/transformers", help="for checkpoints")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    config = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, **shape)
    train, (images, labels) = digits.load()
    samples = [{"pixel_values": image.view(1, 8, 8), "labels": label} for image, label in train]
    arguments = TrainingArguments(
        output_dir=args.folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        max_steps=args.steps,
        save_steps=args.steps // 2,
        logging_steps=args.steps // 4,
        report_to="none",
        disable_tqdm=True,
    )

    # The one object that hands the gradients to gsync. It finds the Trainer's DDP instance, and saves beside the checkpoints.
    gsync_callback = GsyncCallback(codec="int8", error_feedback=True, resume_from_checkpoint=args.resume)
    if args.resume:  # the Trainer of 5.24 does not find this model's weights in its own checkpoint
        model = ViTForImageClassification.from_pretrained(args.resume)
    else:
        model = ViTForImageClassification(config)
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[gsync_callback])
    trainer.train(resume_from_checkpoint=args.resume)

    stats = gsync_callback.sync.stats()
    if trainer.is_world_process_zero():
        print(stats)
        with torch.no_grad():
            guesses = model.eval()(images.view(-1, 1, 8, 8).to(model.device)).logits.argmax(1).cpu()
        print(f"accuracy {(guesses == labels).float().mean():.3f} on {len(labels)} images that were not trained on")


if __name__ == "__main__":
    main()
