#!/usr/bin/env python3
"""Writes the oracle tables of flamia-format's tests, from ml_dtypes.

    python3 scripts/format_tables.py [folder, default flamia-format/tests/tables]

The committed tables were written with ml_dtypes 0.6.0 and numpy 2.4.6; other versions should give
the same files. Every table is text: hexadecimal bit patterns, one entry a line, `#` for comments.

    e4m3_decode.txt       f32 bits of the 256 E4M3 codes, in order
    e4m3_from_bf16.txt    every bf16 input, as runs: first bits of the run, its code
    e4m3_from_f16.txt     every f16 input, likewise
    e4m3_from_f32.txt     f32 bits and code: for every pair of adjacent codes of one sign their
                          midpoint and the floats on both sides of it; then the special values
    ue8m0_decode.txt      f32 bits of the 256 UE8M0 scales, in order

ml_dtypes turns magnitudes above 464 into NaN where the project saturates, so inputs are clamped to
448 before they are encoded. NaN passes the clamp.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
MAX = np.float32(448)


def encode(values: np.ndarray) -> np.ndarray:
    """E4M3 codes of f32 values, saturating."""
    assert values.dtype == np.float32
    return np.clip(values, -MAX, MAX).astype(E4M3).view(np.uint8)


def decode_e4m3() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def runs(dtype) -> list[str]:
    """All 65,536 inputs of a 16-bit type, as the runs of bits that share a code."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        codes = encode(bits.view(dtype).astype(np.float32))
    starts = np.flatnonzero(np.diff(codes.astype(np.int16), prepend=-1))
    return [f"{bits[i]:04x} {codes[i]:02x}" for i in starts]


def f32_boundaries() -> list[str]:
    values = decode_e4m3()
    inputs = []
    for sign in (0x00, 0x80):
        finite = values[sign : sign + 0x7F].astype(np.float64)
        for midpoint in (finite[1:] + finite[:-1]) / 2:
            exact = np.float32(midpoint)
            assert float(exact) == midpoint
            inputs += [np.nextafter(exact, np.float32(-np.inf)), exact]
            inputs += [np.nextafter(exact, np.float32(np.inf))]
    special = [0.0, 2.0**-149, 2.0**-126, 448, 464, 465, 480, 1000, 3.4028234663852886e38, np.inf]
    inputs += [np.float32(s) for s in special] + [-np.float32(s) for s in special]
    inputs += [np.nextafter(np.float32(464), np.float32(np.inf))]
    inputs = np.array(inputs + [np.float32(np.nan), np.copysign(np.float32(np.nan), np.float32(-1))])
    return [f"{b:08x} {c:02x}" for b, c in zip(inputs.view(np.uint32), encode(inputs))]


def f32_bits(values: np.ndarray) -> list[str]:
    return [f"{bits:08x}" for bits in values.astype(np.float32).view(np.uint32)]


def decode_ue8m0() -> np.ndarray:
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    # Shifting the byte into the exponent field would give 0 and infinity at the ends.
    assert scales[0] == np.ldexp(np.float32(1), -127) and np.isnan(scales[255])
    return scales


def main() -> None:
    default = Path(__file__).resolve().parent.parent / "flamia-format" / "tests" / "tables"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "e4m3_decode.txt": f32_bits(decode_e4m3()),
        "e4m3_from_bf16.txt": runs(ml_dtypes.bfloat16),
        "e4m3_from_f16.txt": runs(np.float16),
        "e4m3_from_f32.txt": f32_boundaries(),
        "ue8m0_decode.txt": f32_bits(decode_ue8m0()),
    }
    head = f"# scripts/format_tables.py, ml_dtypes {ml_dtypes.__version__}"
    for name, lines in tables.items():
        (folder / name).write_text("\n".join([head, *lines]) + "\n")
        print(f"{folder / name}: {len(lines)} entries")


if __name__ == "__main__":
    main()
