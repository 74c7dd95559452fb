#!/usr/bin/env python3
"""Writes tensors that torchao has quantised, as flamia-format's tests read them.

    python3 scripts/torchao_tables.py [folder, default flamia-format/tests/tables]

The committed tables were written with torchao 0.18.0 and torch 2.11.0. Every table is text:
hexadecimal words, `#` for comments.

    torchao_tensors.txt   five lines for each tensor:
                          bits of a code, group, rows, cols, swizzled, rule (0 up, 1 floor, 2 none),
                          f32 bits of the tensor scale;
                          bf16 bits of the input; bytes of qdata; bytes of scale;
                          f32 bits of what torchao dequantises it to
    torchao_blocked.txt   for each shape of scales two lines: rows, groups; bytes of to_blocked, the
                          dense bytes being (37 row + 11 group + 1) mod 251
"""

import sys
from pathlib import Path

import torch
import torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.mx_formats.utils import to_blocked

RULES = {ScaleCalculationMode.RCEIL: 0, ScaleCalculationMode.FLOOR: 1}


def words(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """The bit patterns of a tensor in memory order."""
    digits = {torch.uint8: 2, torch.int16: 4, torch.int32: 8}[dtype]
    mask = (1 << 4 * digits) - 1
    flat = tensor.detach().contiguous().view(dtype).flatten()
    return " ".join(f"{word & mask:0{digits}x}" for word in flat.tolist())


def inputs(rows: int, cols: int) -> torch.Tensor:
    """Rows of growing magnitude, with an outlier, negative zeros and a group of zeros."""
    generator = torch.Generator().manual_seed(rows * cols)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2((torch.arange(rows) % 9 - 3).float())[:, None]
    x[0, 5] *= 40
    x[1, ::7] = -0.0
    x[2, :32] = 0
    return x.to(torch.bfloat16)


def entry(tensor, bits: int, rule: int, x: torch.Tensor, tensor_scale: torch.Tensor) -> list[str]:
    head = [bits, tensor.block_size, *x.shape, int(tensor.is_swizzled_scales), rule]
    return [
        " ".join(f"{field:x}" for field in head) + " " + words(tensor_scale, torch.int32),
        words(x, torch.int16),
        words(tensor.qdata, torch.uint8),
        words(tensor.scale, torch.uint8),
        words(tensor.dequantize(torch.float32), torch.int32),
    ]


def tensors() -> list[str]:
    lines = []
    one = torch.tensor(1.0)
    for shape, swizzled in (((3, 64), False), ((34, 32), True)):
        x = inputs(*shape)
        for bits, dtype in ((8, torch.float8_e4m3fn), (4, torch.float4_e2m1fn_x2)):
            # torchao offers its upward rule for E4M3 alone.
            for mode in RULES if bits == 8 else [ScaleCalculationMode.FLOOR]:
                tensor = MXTensor.to_mx(
                    x, dtype, scaling_mode=mode, is_swizzled_scales=swizzled
                )
                lines += entry(tensor, bits, RULES[mode], x, one)
        for tensor_scale in (None, torch.tensor(0.3)):
            tensor = NVFP4Tensor.to_nvfp4(
                x, per_tensor_scale=tensor_scale, is_swizzled_scales=swizzled
            )
            lines += entry(tensor, 4, 2, x, one if tensor_scale is None else tensor_scale)
    return lines


def blocked() -> list[str]:
    lines = []
    for rows, groups in ((128, 4), (3, 2), (130, 6)):
        row, group = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
        dense = ((37 * row + 11 * group + 1) % 251).to(torch.uint8)
        lines += [f"{rows:x} {groups:x}", words(to_blocked(dense), torch.uint8)]
    return lines


def main() -> None:
    default = Path(__file__).resolve().parent.parent / "flamia-format" / "tests" / "tables"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    head = f"# scripts/torchao_tables.py, torchao {torchao.__version__}"
    tables = {"torchao_tensors.txt": tensors(), "torchao_blocked.txt": blocked()}
    for name, lines in tables.items():
        (folder / name).write_text("\n".join([head, *lines]) + "\n")
        print(f"{folder / name}: {len(lines)} lines")


if __name__ == "__main__":
    main()
