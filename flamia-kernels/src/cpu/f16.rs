//! FP16 held in `f32`.

/// Rounds to the nearest FP16 value, ties to even; past 65,504 to infinity. Branch-free, so that a
/// loop over it becomes vectors. Adding two FP16 values in `f32` and rounding the sum with this is
/// FP16 addition: `f32` has more than twice FP16's precision, so rounding twice changes nothing.
#[inline(always)]
pub(crate) fn round_f16(x: f32) -> f32 {
    // Adding and subtracting 0.75 · 2^(e+24) rounds to multiples of 2^e: here the spacing of the
    // subnormals, 2^-24.
    const SUBNORMAL: f32 = 0.75;
    const MIN_NORMAL: f32 = 6.103_515_6e-5; // 2^-14
    let bits = x.to_bits();
    let even = (bits >> 13) & 1;
    let normal = f32::from_bits(bits.wrapping_add(0xFFF + even) & !0x1FFF);
    let normal = if normal.abs() > 65_504.0 {
        f32::INFINITY.copysign(x)
    } else {
        normal
    };
    let subnormal = ((x.abs() + SUBNORMAL) - SUBNORMAL).copysign(x);
    let rounded = if x.abs() < MIN_NORMAL {
        subnormal
    } else {
        normal
    };
    if x.is_nan() { x } else { rounded }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    /// `half` is the oracle: every FP16 value, every midpoint between neighbours, and the `f32`
    /// values next to those.
    #[test]
    fn agrees_with_half_at_every_boundary() {
        let oracle = |x: f32| f16::from_f32(x).to_f32();
        let mut checked = 0;
        for code in 0..0x7C00u16 {
            let low = f16::from_bits(code).to_f32();
            let high = if code == 0x7BFF {
                65_536.0
            } else {
                f16::from_bits(code + 1).to_f32()
            };
            let middle = (low + high) / 2.0;
            for x in [
                low,
                middle,
                middle.next_up(),
                middle.next_down(),
                high.next_down(),
            ] {
                for x in [x, -x] {
                    assert_eq!(round_f16(x).to_bits(), oracle(x).to_bits(), "{x:e}");
                    checked += 1;
                }
            }
        }
        assert_eq!(checked, 0x7C00 * 10);
        for x in [
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-40,
            -0.0,
        ] {
            assert_eq!(round_f16(x).to_bits(), oracle(x).to_bits(), "{x:e}");
        }
        assert!(round_f16(f32::NAN).is_nan());
    }

    #[test]
    fn rounding_an_f32_sum_is_fp16_addition() {
        for i in 0..0x7C00u16 {
            let j = i.wrapping_mul(40_503) % 0x7C00;
            for sign in [0, 0x8000] {
                let (a, b) = (f16::from_bits(i), f16::from_bits(j | sign));
                let exact = a.to_f64() + b.to_f64();
                let sum = round_f16(a.to_f32() + b.to_f32());
                assert_eq!(
                    sum.to_bits(),
                    f16::from_f64(exact).to_f32().to_bits(),
                    "{a} + {b}"
                );
            }
        }
    }
}
