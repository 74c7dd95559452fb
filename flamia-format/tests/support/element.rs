//! What every element format is held to: the tables of all bf16, all f16 and of f32's boundaries.

use super::{pairs, same};

/// An element format as its tests see it.
pub struct Element {
    /// The value of every code.
    pub values: &'static [f32],
    /// The sign bit of a code.
    pub sign: u8,
    pub encode: fn(f32) -> u8,
    pub round: fn(f32) -> f32,
    pub f32_table: &'static str,
}

impl Element {
    /// Both ways of rounding. A NaN's code is the table's, its rounded value is NaN.
    #[track_caller]
    pub fn assert_encodes(&self, x: f32, code: u8) {
        let found = (self.encode)(x);
        assert!(found == code, "{x:e} gave {found:#04x}, not {code:#04x}");
        let expected = if x.is_nan() {
            x
        } else {
            self.values[usize::from(code)]
        };
        let rounded = (self.round)(x);
        assert!(
            same(rounded, expected),
            "round({x:e}) gave {rounded:e}, not {expected:e}"
        );
        if x.is_nan() {
            assert_eq!(rounded.is_sign_negative(), x.is_sign_negative());
        }
    }

    /// Every bf16 input.
    pub fn check_bf16(&self, table: &str) {
        self.check_runs(table, |bits| f32::from_bits(u32::from(bits) << 16));
    }

    /// Every f16 input.
    pub fn check_f16(&self, table: &str) {
        self.check_runs(table, |bits| {
            let (exponent, mantissa) = (i32::from(bits >> 10 & 0x1F), f64::from(bits & 0x3FF));
            let magnitude = match exponent {
                0 => mantissa * 2f64.powi(-24),
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
            };
            (magnitude as f32).copysign(if bits >> 15 == 0 { 1.0 } else { -1.0 })
        });
    }

    /// Every input of a 16-bit type, from the runs of inputs that share a code.
    fn check_runs(&self, table: &str, widen: impl Fn(u16) -> f32) {
        let runs = pairs(table);
        let mut run = 0;
        for bits in 0..=u16::MAX {
            if runs
                .get(run + 1)
                .is_some_and(|&(start, _)| start == u32::from(bits))
            {
                run += 1;
            }
            self.assert_encodes(widen(bits), runs[run].1);
        }
        assert_eq!(run + 1, runs.len());
    }

    /// The midpoints of adjacent codes and the floats next to them.
    pub fn check_f32_table(&self, entries: usize) {
        let table = pairs(self.f32_table);
        assert_eq!(table.len(), entries);
        for (bits, code) in table {
            self.assert_encodes(f32::from_bits(bits), code);
        }
    }

    /// Rounding never decreases, so that between two neighbours of the table with the same code
    /// every float has that code; neighbours with different codes are adjacent floats.
    pub fn sweep_f32(&self, step: usize) {
        let mut table = pairs(self.f32_table);
        table.retain(|&(bits, _)| f32::from_bits(bits) >= 0.0 && bits >> 31 == 0);
        table.sort_unstable();
        table.dedup();
        let mut swept = 0;
        for pair in table.windows(2) {
            let [(first, code), (last, last_code)] = [pair[0], pair[1]];
            assert!(code == last_code || last == first + 1);
            let value = self.values[usize::from(code)].to_bits();
            for bits in (first..last).step_by(step) {
                let x = f32::from_bits(bits);
                assert!((self.round)(x).to_bits() == value, "{x:e}");
                assert!((self.round)(-x).to_bits() == value | 1 << 31, "-{x:e}");
                assert!((self.encode)(x) == code, "{x:e}");
                assert!((self.encode)(-x) == code | self.sign, "-{x:e}");
                swept += 1;
            }
        }
        assert!(swept >= (f32::INFINITY.to_bits() as usize) / step);
    }
}
