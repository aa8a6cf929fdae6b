"""Trains a draft head: `python tools/train_draft.py CONFIG.yaml`, the same as `jaxspec train-draft CONFIG.yaml`."""

import sys

from jaxspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-draft", *sys.argv[1:]]))
