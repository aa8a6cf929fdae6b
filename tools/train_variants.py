"""Trains variations of one configuration on the same data, and prints what each has learned, as a table.

  python tools/train_variants.py configs/train/smollm2-eagle3.yaml \\
      base full:head.draft_vocab_size=null "low:head.taps=[2,8,15];training.steps=1000"

Each variation is a name, and after a colon the keys that differ, with semicolons between; it is kept in the
configuration's `output` with the name after it. One that is finished is only read.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

from jaxspec.config import build
from jaxspec.errors import UserError
from jaxspec.train.config import TrainConfig, check, read_train_config
from jaxspec.train.run import HEAD_DIRECTORY, train


def vary(raw: dict[str, Any], name: str, changes: dict[str, Any]) -> TrainConfig:
    varied = json.loads(json.dumps(raw))
    varied["output"] = f"{raw['output']}-{name}"
    for key, value in changes.items():
        section, _, field = key.rpartition(".")
        (varied.setdefault(section, {}) if section else varied)[field] = value
    return build(varied, TrainConfig, name)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    name, _, listed = text.partition(":")
    changes = {}
    for change in filter(None, listed.split(";")):
        key, equals, value = change.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{key} has no value: write {key}=VALUE")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise argparse.ArgumentTypeError(f"{change}: {error}") from error
    return name, changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("variants", nargs="+", type=parse, metavar="NAME[:KEY=VALUE;…]")
    options = parser.parse_args()
    try:
        compare(options)
    except UserError as error:
        sys.exit(f"jaxspec: {error}")


def compare(options: argparse.Namespace) -> None:
    read_train_config(options.config)  # which says what is wrong with the file
    raw = yaml.safe_load(options.config.read_text())
    names = [name for name, _ in options.variants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two variants are named {twice[0]}: give each a name of its own")
    configs = {name: vary(raw, name, changes) for name, changes in options.variants}
    for name, config in configs.items():
        check(config, f"variant {name}")
    print("| variant | M parameters | steps | M tokens | right in step 1, 2, … | tokens a round | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name, config in configs.items():
        started = time.perf_counter()
        train(config, lambda line, name=name: print(f"jaxspec: {name}: {line}", file=sys.stderr))
        tensors = load_file(config.output / HEAD_DIRECTORY / "model.safetensors")
        size = sum(array.size for name, array in tensors.items() if name not in ("d2t", "t2d"))
        lines = (config.output / "metrics.jsonl").read_text().splitlines()
        last = [each for line in lines if (each := json.loads(line))["split"] == "heldout"][-1]
        accuracy = " ".join(f"{share:.3f}" for share in last["accuracy"])
        print(
            f"| {name} | {size / 1e6:.1f} | {last['step']} | {last['tokens'] / 1e6:.1f} | {accuracy} "
            f"| {last['accepted_length']:.2f} | {time.perf_counter() - started:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
