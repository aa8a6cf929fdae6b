"""Writes tests/fixtures/torch/small.bin: a state dict of every kind of tensor that jaxspec reads, by torch itself.

Run with a Python that has torch (2.13.0 wrote the committed file):  python tools/make_torch_fixture.py
"""

from collections import OrderedDict
from pathlib import Path

import torch

OUT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "torch" / "small.bin"


def main() -> None:
    grid = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    both = torch.arange(10, dtype=torch.float32)
    tensors = OrderedDict(
        float32=grid.clone(),
        float16=grid.to(torch.float16) / 8,
        bfloat16=grid.to(torch.bfloat16) / 8,
        int64=torch.arange(5) - 2,
        int32=torch.arange(5, dtype=torch.int32) - 2,
        bool=torch.tensor([True, False, True]),
        transposed=grid.clone().T,
        head=both[:4],
        tail=both[4:].reshape(2, 3),
        every_other=both[1::2],
        expanded=torch.tensor([3.0]).expand(2, 3),
        empty=torch.empty(0, 3),
        scalar=torch.tensor(2.5),
    )
    tensors["parameter"] = torch.nn.Parameter(grid + 100)
    tensors._metadata = OrderedDict({"": {"version": 1}})  # as a module's state_dict has it
    OUT.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, OUT)


if __name__ == "__main__":
    main()
