//! 2^x as the kernels can evaluate it, in `f32`.
//!
//! Besides the exact one there are the polynomial that takes load off the exponential unit, and the
//! two bit-level approximations for inference (paper, section 3.7 and appendix C). NaN stays NaN in
//! all of them.

use super::real::exp2_f32;
use crate::options::{Ablation, Exponential, Options};

/// 2^x by a polynomial of `degree` 2 to 5 in the fraction of x, its integer part added to the
/// exponent field; 0 under 2^-126, which is the clamp that keeps the exponent field from wrapping.
/// For x under 128.
///
/// # Panics
/// If there is no polynomial of that degree.
pub fn polynomial(x: f32, degree: u32) -> f32 {
    clamped(x, coefficients(degree))
}

/// [`polynomial`] without the clamp, to see what it is there for: from x = -127 down the exponent
/// field wraps into the sign, and the result is any number.
///
/// # Panics
/// If there is no polynomial of that degree.
pub fn polynomial_unclamped(x: f32, degree: u32) -> f32 {
    wrapping(x, coefficients(degree))
}

/// Coefficients in ascending order, for the least largest relative error on [0, 1].
fn coefficients(degree: u32) -> &'static [f32] {
    match degree {
        2 => &[1.001_724_7, 0.657_636_3, 0.337_189_44],
        3 => &[0.999_925_2, 0.695_833_56, 0.226_067_16, 0.078_024_52],
        4 => &[
            1.000_002_6,
            0.693_003_83,
            0.241_442_75,
            0.052_011_46,
            0.013_534_168,
        ],
        5 => &[
            0.999_999_94,
            0.693_153_1,
            0.240_153_71,
            0.055_826_318,
            0.008_989_34,
            0.001_877_576_7,
        ],
        _ => panic!("no polynomial of degree {degree}: there are 2 to 5"),
    }
}

#[inline(always)]
fn clamped(x: f32, coefficients: &[f32]) -> f32 {
    let value = wrapping(x, coefficients);
    if x < -126.0 { 0.0 } else { value }
}

#[inline(always)]
fn wrapping(x: f32, coefficients: &[f32]) -> f32 {
    let floor = x.floor();
    let fraction = x - floor;
    let value = coefficients
        .iter()
        .rev()
        .fold(0.0f32, |sum, c| sum.mul_add(fraction, *c));
    let exponent = (floor as i32) << 23;
    f32::from_bits(value.to_bits().wrapping_add(exponent as u32))
}

/// Mitchell-P: 2^⌊x⌋ (1 + {x}) shifted down by log2(1.25) - 0.25, within 4.7 % of 2^x from
/// x = -123 on, about 2^-124 below; for x under 4.
#[inline(always)]
pub fn mitchell_p(x: f32) -> f32 {
    /// Scores down to this many powers of two are exact.
    const WINDOW: f32 = 124.0;
    const DELTA: f32 = 0.071_928_1;
    const FRACTION: f32 = 65_536.0;
    const MAGIC: f32 = 8_388_608.0 + WINDOW * FRACTION;
    const LOWEST: i32 = 8_388_608.0f32.to_bits() as i32;
    const TO_EXPONENT: u32 = (127u32 << 23).wrapping_sub(MAGIC.to_bits() << 7);
    // The sum's exponent is fixed at 2^23, so that rounding it writes x in fixed point into the low
    // bits.
    let fixed = x.mul_add(FRACTION, MAGIC - DELTA * FRACTION);
    // Compared as integers: what is below the window would wrap.
    let bits = (fixed.to_bits() as i32).max(LOWEST) as u32;
    let value = f32::from_bits((bits << 7).wrapping_add(TO_EXPONENT));
    if x.is_nan() { x } else { value }
}

/// Schraudolph's exponential with a BF16 mantissa: between 3.9 % below and 2.0 % above 2^x before
/// the mantissa is rounded, and 0.2 % above on average, because its constant is rounded to FP32; 0
/// from x = -127 down. For x under 128.
#[inline(always)]
pub fn schraudolph(x: f32) -> f32 {
    const SIGMA: f32 = 0.0573;
    const MAGIC: f32 = 12_582_912.0 + 128.0 * (127.0 - SIGMA);
    // The paper leaves the field to wrap at x = -383. All under -127 is 0 anyway.
    let x = if x < -382.0 { -382.0 } else { x };
    let fixed = x.mul_add(128.0, MAGIC);
    let value = f32::from_bits(fixed.to_bits() << 16);
    // A set sign bit says that x was under -127.
    let value = if value > 0.0 { value } else { 0.0 };
    if x.is_nan() { x } else { value }
}

/// The exponential of one pass of a call.
#[derive(Clone, Copy)]
pub(crate) enum Exp2 {
    Exact,
    /// Of every 16 neighbouring keys the first `lanes`.
    Polynomial {
        coefficients: &'static [f32],
        lanes: usize,
    },
    Unclamped {
        coefficients: &'static [f32],
    },
    MitchellP,
    /// Of every 16 neighbouring keys the first ten.
    Schraudolph,
}

/// Eight pairs of keys: the period in which exponentials are shared out.
const PERIOD: usize = 16;

impl Exp2 {
    pub fn forward(options: &Options) -> Self {
        match options.ablate {
            Some(Ablation::ExpForward) if options.exponential == Exponential::Exact => {
                let four_bit_p = options.path == crate::options::Path::Fp4;
                if four_bit_p {
                    Self::MitchellP
                } else {
                    Self::Schraudolph
                }
            }
            _ => Self::new(options),
        }
    }

    pub fn backward(options: &Options) -> Self {
        match options.ablate {
            Some(Ablation::ExpForward) => Self::Exact,
            _ => Self::new(options),
        }
    }

    fn new(options: &Options) -> Self {
        let polynomial = options.polynomial;
        if options.ablate == Some(Ablation::UnclampedPolynomial) {
            return Self::Unclamped {
                coefficients: coefficients(polynomial.degree),
            };
        }
        match options.exponential {
            Exponential::Exact => Self::Exact,
            Exponential::Polynomial => Self::Polynomial {
                coefficients: coefficients(polynomial.degree),
                lanes: 2 * polynomial.eighths as usize,
            },
            Exponential::MitchellP => Self::MitchellP,
            Exponential::Schraudolph => Self::Schraudolph,
        }
    }

    /// Replaces `x` by 2^x. `x` starts at a multiple of [`PERIOD`] keys of the document.
    #[inline(always)]
    pub fn apply(self, x: &mut [f32]) {
        match self {
            Self::Exact => map(x, exp2_f32),
            Self::Polynomial {
                coefficients,
                lanes,
            } => map_some(x, lanes, |x| clamped(x, coefficients)),
            Self::Unclamped { coefficients } => map(x, |x| wrapping(x, coefficients)),
            Self::MitchellP => map(x, mitchell_p),
            Self::Schraudolph => map_some(x, 10, schraudolph),
        }
    }
}

#[inline(always)]
fn map(x: &mut [f32], f: impl Fn(f32) -> f32) {
    for x in x {
        *x = f(*x);
    }
}

#[inline(always)]
fn map_some(x: &mut [f32], lanes: usize, approximate: impl Fn(f32) -> f32) {
    for x in x.chunks_mut(PERIOD) {
        let lanes = lanes.min(x.len());
        map(&mut x[..lanes], &approximate);
        map(&mut x[lanes..], exp2_f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 2^-12th of the range.
    fn range(low: i32, high: i32) -> impl Iterator<Item = f32> {
        (low * 4096..high * 4096).map(|i| i as f32 / 4096.0)
    }

    fn ratio(approximate: f32, x: f32) -> f64 {
        f64::from(approximate) / f64::from(x).exp2()
    }

    #[test]
    fn polynomials_keep_their_error() {
        for (degree, bound) in [(2, 1.73e-3), (3, 7.5e-5), (4, 2.8e-6), (5, 2.3e-7)] {
            let worst = range(-125, 16)
                .map(|x| (ratio(polynomial(x, degree), x) - 1.0).abs())
                .fold(0.0, f64::max);
            println!("degree {degree}: {worst:.3e}");
            assert!(worst < bound && worst > bound / 4.0, "{degree}: {worst:e}");
        }
    }

    #[test]
    fn only_the_clamp_saves_low_scores() {
        for x in [-126.5, -200.0, -577.0, -1e9, f32::NEG_INFINITY] {
            assert_eq!(polynomial(x, 3), 0.0);
        }
        // A range of 400 nats.
        let wild = range(-577, 0).map(|x| polynomial_unclamped(x, 3).abs());
        assert!(wild.fold(0.0, f32::max) > 1e30);
        assert_eq!(polynomial_unclamped(-3.25, 3), polynomial(-3.25, 3));
    }

    /// Paper, appendix C.1.
    #[test]
    fn mitchell_stays_within_its_error_and_its_window() {
        let (low, high) = range(-123, 4)
            .map(|x| ratio(mitchell_p(x), x))
            .fold((f64::MAX, f64::MIN), |(low, high), r| {
                (low.min(r), high.max(r))
            });
        println!("Mitchell-P between {low:.4} and {high:.4} of 2^x");
        assert!(low > 1.0 - 0.0490 && high < 1.0 + 0.0475, "{low} {high}");
        for x in [-124.0, -500.0, -1e30, f32::NEG_INFINITY] {
            assert!((0.0..1e-36).contains(&mitchell_p(x)), "{x}");
        }
    }

    /// Paper, appendix C.2.
    #[test]
    fn schraudolph_is_right_on_average() {
        let ratios: Vec<f64> = range(-100, 8).map(|x| ratio(schraudolph(x), x)).collect();
        let low = ratios.iter().copied().fold(f64::MAX, f64::min);
        let high = ratios.iter().copied().fold(f64::MIN, f64::max);
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        println!("Schraudolph between {low:.4} and {high:.4} of 2^x, mean {mean:.5}");
        assert!(
            low > 0.955 && low < 0.965 && high < 1.025 && high > 1.015,
            "{low} {high}"
        );
        assert!((mean - 1.0).abs() < 3e-3, "{mean}");
        for x in [-127.5, -300.0, -383.5, -1e30, f32::NEG_INFINITY] {
            assert_eq!(schraudolph(x), 0.0, "{x}");
        }
    }

    #[test]
    fn nan_stays_nan() {
        for f in [
            mitchell_p,
            schraudolph,
            |x| polynomial(x, 3),
            |x| polynomial_unclamped(x, 2),
        ] {
            assert!(f(f32::NAN).is_nan());
        }
    }

    #[test]
    fn lanes_are_shared_out_by_pairs() {
        let options = Options {
            exponential: Exponential::Polynomial,
            ..Options::new(crate::Path::Mxfp8, crate::Mask::Causal)
        };
        let mut x = [-0.3f32; 32];
        Exp2::forward(&options).apply(&mut x);
        for (i, x) in x.into_iter().enumerate() {
            let expected = if i % 16 < 8 {
                polynomial(-0.3, 3)
            } else {
                exp2_f32(-0.3)
            };
            assert_eq!(x, expected, "{i}");
        }
    }
}
