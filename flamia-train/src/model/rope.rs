//! Rotary position embeddings (Su et al., 2021), in Llama's half-split layout.

use tch::{Kind, TchError, Tensor};

use crate::device::send;

/// The rotation of every token of a packed row.
#[derive(Debug)]
pub struct Rope {
    /// `[T, 1, E/2]`, broadcast over heads.
    cos: Tensor,
    /// `[T, 1, E/2]`.
    sin: Tensor,
}

impl Rope {
    /// The rotations for `positions` `[T]` (int64, each counted from its document's start): pair `i`
    /// turns by `position * theta^(-2i/head_dim)`.
    ///
    /// # Errors
    /// When torch refuses, as for positions of another dtype.
    pub fn new(positions: &Tensor, head_dim: usize, theta: f64) -> Result<Self, TchError> {
        let frequencies: Vec<f64> = (0..head_dim / 2)
            .map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64))
            .collect();
        let frequencies = send(&Tensor::f_from_slice(&frequencies)?, positions.device())?;
        // Angles in f64: at position 100,000 an f32 angle is off by thousandths of a radian.
        let angles = positions
            .f_to_kind(Kind::Double)?
            .f_outer(&frequencies)?
            .f_unsqueeze(1)?;
        Ok(Self {
            cos: angles.f_cos()?.f_to_kind(Kind::Float)?,
            sin: angles.f_sin()?.f_to_kind(Kind::Float)?,
        })
    }

    /// Turns `x` `[T, heads, E]`, pairing element `i` with `i + E/2` as Hugging Face's Llama does. It
    /// computes in f32, whatever the kind of `x`, which is the result's.
    ///
    /// # Errors
    /// When torch refuses, as for an `x` of another length.
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let halves = x.f_chunk(2, -1)?;
        let (a, b) = (&halves[0], &halves[1]);
        let turned_a = a.f_mul(&self.cos)?.f_sub(&b.f_mul(&self.sin)?)?;
        let turned_b = b.f_mul(&self.cos)?.f_add(&a.f_mul(&self.sin)?)?;
        Tensor::f_cat(&[turned_a, turned_b], -1)?.f_to_kind(x.kind())
    }
}
