//! What a backend does for one document and key/value head.

use std::ops::Range;

use flamia_sched::Mask;

use super::forward::TileOutput;
use super::gemm::Gemm;
use super::operands::Rows;
use super::scheme::Scheme;
use super::simd::Task;
use crate::stats::StatsSnapshot;

/// What a query head needs in the backward pass besides keys and values.
pub(crate) struct SavedHead<S: Scheme> {
    /// Number of the head in the call.
    pub head: usize,
    pub q: S::Loaded,
    pub d_o: S::Loaded,
    pub o: Rows<S::Real>,
    pub lse: Vec<S::Real>,
}

/// Gradients of a unit: dQ of each query head, dK and dV, in the units of the inputs.
pub struct UnitGradients<R> {
    pub dq: Vec<Rows<R>>,
    pub dk: Rows<R>,
    pub dv: Rows<R>,
    pub counts: StatsSnapshot,
}

/// One way of computing a unit.
pub(crate) trait Backend: Scheme {
    /// Keys and values as the tile loops read them.
    type KeysValues: Send + Sync;

    fn keys_values(&self, k: Self::Loaded, v: Self::Loaded) -> Self::KeysValues;

    /// The forward pass of one query tile.
    fn attend(
        &self,
        q: &Self::Loaded,
        kv: &Self::KeysValues,
        queries: Range<usize>,
        mask: Mask,
        scale: f64,
    ) -> TileOutput<Self::Real>;

    /// The backward pass of the query heads that share `kv`. dQ and dK come without the softmax
    /// scale and are not rotated back.
    fn gradients(
        &self,
        kv: &Self::KeysValues,
        heads: Vec<SavedHead<Self>>,
        mask: Mask,
        scale: f64,
    ) -> UnitGradients<Self::Real>
    where
        Self: Sized;
}

/// Brings a gradient into the units of its input, rotates it back and rounds it.
pub(crate) struct Finish<'a, S: Scheme> {
    pub scheme: &'a S,
    pub rows: &'a mut Rows<S::Real>,
    pub scale: S::Real,
    pub rotate: bool,
}

impl<S: Scheme> Task for Finish<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<G: Gemm>(self) {
        self.rows.data.iter_mut().for_each(|x| *x *= self.scale);
        if self.rotate {
            self.scheme.rotate(self.rows);
        }
        self.scheme.round_output(&mut self.rows.data);
    }
}
