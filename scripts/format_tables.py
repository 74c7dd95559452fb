#!/usr/bin/env python3
"""Writes the oracle tables of flamia-format's tests, from ml_dtypes and numpy.

    python3 scripts/format_tables.py [folder, default flamia-format/tests/tables]

The committed tables were written with ml_dtypes 0.6.0 and numpy 2.4.6; other versions should give
the same files. Every table is text: hexadecimal bit patterns, one entry a line, `#` for comments.
ELEMENT is e4m3 or e2m1.

    ELEMENT_decode.txt    f32 bits of the 256 E4M3 or 16 E2M1 codes, in order
    ELEMENT_from_bf16.txt every bf16 input, as runs: first bits of the run, its code
    ELEMENT_from_f16.txt  every f16 input, likewise
    ELEMENT_from_f32.txt  f32 bits and code: for every pair of adjacent codes of one sign their
                          midpoint and the floats on both sides of it; then the special values
    ue8m0_decode.txt      f32 bits of the 256 UE8M0 scales, in order
    random_bits.txt       seed, counter, the 32 random bits
    nvfp4_groups.txt      a group of 16: scale, 16 times f32 bits, 16 codes
    mx_groups.txt         a group of 32: element (4 or 8 bits), rule (0 up, 1 floor), scale,
                          32 times f32 bits, 32 codes

ml_dtypes turns magnitudes above 464 into an E4M3 NaN where the project saturates, so inputs are
clamped to the largest value before they are encoded. NaN passes the clamp for E4M3; E2M1 has none,
and there the project takes it for the infinity of its sign.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

F32_INF = np.float32(np.inf)


@dataclass(frozen=True)
class Element:
    dtype: type
    bits: int
    largest: np.float32
    # Codes of one sign that are numbers.
    finite: int
    specials: list

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Codes of f32 values, saturating."""
        assert values.dtype == np.float32
        if self.bits == 4:
            values = np.where(np.isnan(values), np.copysign(F32_INF, values), values)
        return np.clip(values, -self.largest, self.largest).astype(self.dtype).view(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.uint8).view(self.dtype).astype(np.float32)

    def values(self) -> np.ndarray:
        return self.decode(np.arange(1 << self.bits))


E4M3 = Element(ml_dtypes.float8_e4m3fn, 8, np.float32(448), 0x7F, [448, 464, 465, 480, 1000])
E2M1 = Element(ml_dtypes.float4_e2m1fn, 4, np.float32(6), 8, [6, 6.5, 7, 8, 1000])
ELEMENTS = {"e4m3": E4M3, "e2m1": E2M1}


def runs(element: Element, dtype) -> list[str]:
    """All 65,536 inputs of a 16-bit type, as the runs of bits that share a code."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        codes = element.encode(bits.view(dtype).astype(np.float32))
    starts = np.flatnonzero(np.diff(codes.astype(np.int16), prepend=-1))
    return [f"{bits[i]:04x} {codes[i]:02x}" for i in starts]


def f32_boundaries(element: Element) -> list[str]:
    values = element.values()
    inputs = []
    for sign in (0, 1 << (element.bits - 1)):
        finite = values[sign : sign + element.finite].astype(np.float64)
        for midpoint in (finite[1:] + finite[:-1]) / 2:
            exact = np.float32(midpoint)
            assert float(exact) == midpoint
            inputs += [np.nextafter(exact, -F32_INF), exact]
            inputs += [np.nextafter(exact, F32_INF)]
    special = [0.0, 2.0**-149, 2.0**-126, *element.specials, 3.4028234663852886e38, np.inf]
    inputs += [np.float32(s) for s in special] + [-np.float32(s) for s in special]
    inputs += [np.nextafter(np.float32(element.specials[1]), F32_INF)]
    inputs = np.array(inputs + [np.float32(np.nan), np.copysign(np.float32(np.nan), np.float32(-1))])
    return [f"{b:08x} {c:02x}" for b, c in zip(inputs.view(np.uint32), element.encode(inputs))]


def f32_bits(values: np.ndarray) -> list[str]:
    return [f"{bits:08x}" for bits in values.astype(np.float32).view(np.uint32)]


def decode_ue8m0() -> np.ndarray:
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    # Shifting the byte into the exponent field would give 0 and infinity at the ends.
    assert scales[0] == np.ldexp(np.float32(1), -127) and np.isnan(scales[255])
    return scales


def splitmix64(state: int):
    """The generator of Steele, Lea and Flood, stepped one state at a time."""
    mask = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def random_bits() -> list[str]:
    # Published outputs for the state 1234567.
    known = splitmix64(1234567)
    assert [next(known) for _ in range(2)] == [6457827717110365317, 3203168211198807973]
    lines = []
    for seed in [0, 1, 2, 0x5EED, 1 << 32, (1 << 64) - 1]:
        start = next(splitmix64(seed))
        # The project's counter 0 is the mixed start itself, one step before the first output.
        outputs = splitmix64((start - 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
        for counter, output in zip(range(16), outputs):
            lines.append(f"{seed:x} {counter:x} {output >> 32:08x}")
    return lines


def groups(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Groups of every magnitude, some with outliers, zeros or a poison."""
    values = rng.standard_normal((count, length)).astype(np.float32)
    values *= np.exp2(rng.uniform(-20, 20, (count, 1))).astype(np.float32)
    values[1::4, 3] *= np.float32(50)
    values[2::4, ::5] = np.float32(-0.0)
    values[-1] = np.float32(-0.0)
    values[-2, 7] = np.nan
    values[-3, length - 1] = -F32_INF
    return values


def group_line(head: str, values: np.ndarray, codes: np.ndarray) -> str:
    return " ".join([head, *f32_bits(values), *(f"{code:02x}" for code in codes)])


def nvfp4_groups() -> list[str]:
    lines = []
    for values in groups(np.random.default_rng(16), 64, 16):
        amax = np.max(np.abs(values))
        if not np.isfinite(amax):
            scale, codes = 0x7F, np.zeros(16, dtype=np.uint8)
        else:
            scale = E4M3.encode(np.array([amax / np.float32(6)]))[0]
            divisor = E4M3.decode(np.array([scale]))[0]
            codes = E2M1.encode(values / divisor) if divisor else np.zeros(16, dtype=np.uint8)
        lines.append(group_line(f"{scale:02x}", values, codes))
    return lines


def mx_groups() -> list[str]:
    lines = []
    rng = np.random.default_rng(32)
    for element in (E2M1, E4M3):
        poison = 0x7F if element.bits == 8 else 0
        for rule in (0, 1):
            for values in groups(rng, 32, 32):
                amax = float(np.max(np.abs(values)))
                if not np.isfinite(amax):
                    scale, codes = 255, np.full(32, poison, dtype=np.uint8)
                elif amax == 0:
                    scale, codes = 0, np.zeros(32, dtype=np.uint8)
                else:
                    if rule == 0:
                        e = int(np.ceil(np.log2(amax) - np.log2(float(element.largest))))
                        e -= amax <= float(element.largest) * 2.0 ** (e - 1)
                        e += amax > float(element.largest) * 2.0**e
                    else:
                        e = int(np.frexp(amax)[1] - np.frexp(float(element.largest))[1])
                    scale, codes = e + 127, element.encode(values * np.float32(2.0**-e))
                lines.append(group_line(f"{element.bits} {rule} {scale:02x}", values, codes))
    return lines


def main() -> None:
    default = Path(__file__).resolve().parent.parent / "flamia-format" / "tests" / "tables"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    tables = {}
    for name, element in ELEMENTS.items():
        tables |= {
            f"{name}_decode.txt": f32_bits(element.values()),
            f"{name}_from_bf16.txt": runs(element, ml_dtypes.bfloat16),
            f"{name}_from_f16.txt": runs(element, np.float16),
            f"{name}_from_f32.txt": f32_boundaries(element),
        }
    tables |= {
        "ue8m0_decode.txt": f32_bits(decode_ue8m0()),
        "random_bits.txt": random_bits(),
        "nvfp4_groups.txt": nvfp4_groups(),
        "mx_groups.txt": mx_groups(),
    }
    head = f"# scripts/format_tables.py, ml_dtypes {ml_dtypes.__version__}"
    for name, lines in tables.items():
        (folder / name).write_text("\n".join([head, *lines]) + "\n")
        print(f"{folder / name}: {len(lines)} entries")


if __name__ == "__main__":
    main()
