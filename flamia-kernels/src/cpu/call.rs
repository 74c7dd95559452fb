//! A whole call: checks, units over threads, results in the caller's layout.

use std::ops::Range;

use flamia_sched::{Documents, query_tile_cost, query_tiles};
use rayon::prelude::*;

use super::forward::TileOutput;
use super::hopper::Hopper;
use super::low_bit::{LowBit, TensorMaxima};
use super::operands::{Prepare, Role, Rows, rotate};
use super::real::Real;
use super::scheme::Exact;
use super::simd::dispatch;
use super::unit::{Backend, Finish, SavedHead, UnitGradients};
use crate::error::AttentionError;
use crate::options::{Ablation, Options, Path, Profile};
use crate::stats::{Stats, StatsSnapshot};
use crate::view::{Element, Source, TensorView};

/// Results of [`forward`].
#[derive(Clone, Debug, PartialEq)]
pub struct Forward<E: Element> {
    /// `[rows, heads, head_dim]`, contiguous. A row that sees no key is 0.
    pub o: Vec<E>,
    /// Log-sum-exp of the scaled scores, natural logarithm, `[heads, rows]`; +∞ for a row that sees
    /// no key.
    pub lse: Vec<E::Real>,
}

/// Results of [`backward`], contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<E> {
    /// `[rows, heads, head_dim]`.
    pub dq: Vec<E>,
    /// `[rows, kv_heads, head_dim]`.
    pub dk: Vec<E>,
    /// `[rows, kv_heads, head_dim]`.
    pub dv: Vec<E>,
}

/// Attention of packed documents on the CPU, forward.
///
/// `q` is `[batch, length, heads, head_dim]`, `k` and `v` `[batch, length, kv_heads, head_dim]`
/// with `heads` a multiple of `kv_heads`; query head `h` reads key/value head
/// `h / (heads / kv_heads)`. `documents` cover `batch * length` rows, none of them in two sequences
/// of the batch. Runs on rayon's current thread pool; the result does not depend on its size.
///
/// A NaN or infinity in an operand of a low-bit path makes its whole scale group NaN (32 tokens
/// of `mxfp8`), and with it every result that reads the group; other groups and other documents are
/// untouched.
///
/// # Errors
/// See [`AttentionError`]; nothing is computed then.
pub fn forward<E: Element>(
    q: &TensorView<E>,
    k: &TensorView<E>,
    v: &TensorView<E>,
    documents: &Documents,
    options: &Options,
    stats: Option<&Stats>,
) -> Result<Forward<E>, AttentionError> {
    let call = Call::new(q, [("k", k), ("v", v)], [], documents, options)?;
    let (result, counts) = match options.path {
        Path::Reference => call.collect_forward(E::Real::exact_forward(&call, q, k, v)),
        _ => call.collect_forward(low_bit_forward(&call, q, k, v)),
    };
    if let Some(stats) = stats {
        stats.add(counts);
    }
    Ok(result)
}

/// Attention of packed documents on the CPU, backward.
///
/// `q`, `k`, `v`, `documents` and `options` are those of [`forward`], `o` and `lse` its results,
/// `d_o` the gradient of `o`. Gradients of a key/value head sum over the query heads that read it.
///
/// # Errors
/// See [`AttentionError`]; nothing is computed then.
#[expect(
    clippy::too_many_arguments,
    reason = "the operands of attention's backward pass"
)]
pub fn backward<E: Element>(
    q: &TensorView<E>,
    k: &TensorView<E>,
    v: &TensorView<E>,
    o: &TensorView<E>,
    lse: &[E::Real],
    d_o: &TensorView<E>,
    documents: &Documents,
    options: &Options,
    stats: Option<&Stats>,
) -> Result<Gradients<E>, AttentionError> {
    let call = Call::new(
        q,
        [("k", k), ("v", v)],
        [("o", o), ("d_o", d_o)],
        documents,
        options,
    )?;
    options.validate_training(call.head_dim)?;
    if lse.len() != call.heads * call.rows {
        return Err(AttentionError::Shape {
            tensor: "lse",
            expected: [1, call.heads, call.rows],
            found: [1, 1, lse.len()],
        });
    }
    let (result, counts) = match options.path {
        Path::Reference => {
            let saved = Saved { q, o, lse, d_o };
            call.collect_backward(E::Real::exact_backward(&call, saved, k, v))
        }
        _ => {
            let lse: Vec<f32> = lse.iter().map(|lse| lse.to_f32()).collect();
            let saved = Saved {
                q,
                o,
                lse: &lse,
                d_o,
            };
            call.collect_backward(low_bit_backward(&call, saved, k, v))
        }
    };
    if let Some(stats) = stats {
        stats.add(counts);
    }
    Ok(result)
}

/// What the backward pass reads of the query side.
#[derive(Clone, Copy)]
pub struct Saved<'a, R> {
    q: &'a dyn Source<R>,
    o: &'a dyn Source<R>,
    lse: &'a [R],
    d_o: &'a dyn Source<R>,
}

/// A computed query tile: head, rows of the packed row, results.
pub type Tile<R> = (usize, Range<usize>, TileOutput<R>);

// The element type ends at `Source`, and these functions name every precision and profile, so that
// the tile loops are compiled once, here, and not again in each crate that calls them.

/// The `reference` path in one precision.
pub trait Exactly: Real {
    #[doc(hidden)]
    fn exact_forward(
        call: &Call,
        q: &dyn Source<Self>,
        k: &dyn Source<Self>,
        v: &dyn Source<Self>,
    ) -> Vec<Tile<Self>>;

    #[doc(hidden)]
    fn exact_backward(
        call: &Call,
        saved: Saved<Self>,
        k: &dyn Source<Self>,
        v: &dyn Source<Self>,
    ) -> Vec<UnitGradients<Self>>;
}

macro_rules! exactly {
    ($($real:ty),+) => {$(
        impl Exactly for $real {
            fn exact_forward(
                call: &Call,
                q: &dyn Source<Self>,
                k: &dyn Source<Self>,
                v: &dyn Source<Self>,
            ) -> Vec<Tile<Self>> {
                call.forward(&Exact::<Self>::new(), q, k, v)
            }

            fn exact_backward(
                call: &Call,
                saved: Saved<Self>,
                k: &dyn Source<Self>,
                v: &dyn Source<Self>,
            ) -> Vec<UnitGradients<Self>> {
                call.backward(&Exact::<Self>::new(), saved, k, v)
            }
        }
    )+};
}

exactly!(f32, f64);

fn low_bit_forward(
    call: &Call,
    q: &dyn Source<f32>,
    k: &dyn Source<f32>,
    v: &dyn Source<f32>,
) -> Vec<Tile<f32>> {
    match call.options.profile {
        Profile::Auto | Profile::BlockScaled => {
            call.forward(&call.low_bit([q, k, v], None), q, k, v)
        }
        Profile::Hopper => call.forward(&Hopper::new(call.options), q, k, v),
    }
}

fn low_bit_backward(
    call: &Call,
    saved: Saved<f32>,
    k: &dyn Source<f32>,
    v: &dyn Source<f32>,
) -> Vec<UnitGradients<f32>> {
    match call.options.profile {
        Profile::Auto | Profile::BlockScaled => {
            let scheme = call.low_bit([saved.q, k, v], Some(saved.d_o));
            call.backward(&scheme, saved, k, v)
        }
        Profile::Hopper => call.backward(&Hopper::new(call.options), saved, k, v),
    }
}

/// A document and key/value head.
struct Unit {
    document: Range<usize>,
    kv_head: usize,
}

/// A checked call.
pub struct Call<'a> {
    options: &'a Options,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Most expensive first, so that no thread is left with a long document in the end.
    units: Vec<Unit>,
}

impl<'a> Call<'a> {
    fn new<E: Element, const N: usize>(
        q: &TensorView<E>,
        keys: [(&'static str, &TensorView<E>); 2],
        outputs: [(&'static str, &TensorView<E>); N],
        documents: &Documents,
        options: &'a Options,
    ) -> Result<Self, AttentionError> {
        let [rows, heads, head_dim] = q.packed_shape();
        let [_, length, ..] = q.shape();
        let kv_heads = keys[0].1.packed_shape()[1];
        options.validate(head_dim)?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::Heads { heads, kv_heads });
        }
        let keys = keys.into_iter().map(|(name, view)| (name, view, kv_heads));
        let outputs = outputs.into_iter().map(|(name, view)| (name, view, heads));
        for (tensor, view, heads) in keys.chain(outputs) {
            let (expected, found) = ([rows, heads, head_dim], view.packed_shape());
            if found != expected || view.shape()[1] != length {
                return Err(AttentionError::Shape {
                    tensor,
                    expected,
                    found,
                });
            }
        }
        if documents.total() != rows {
            return Err(AttentionError::Documents {
                documents: documents.total(),
                rows,
            });
        }

        let mut units = Vec::with_capacity(documents.len() * kv_heads);
        for (index, document) in documents.iter().enumerate() {
            if document.is_empty() {
                continue;
            }
            if document.start / length != (document.end - 1) / length {
                return Err(AttentionError::CrossesBatch {
                    document: index,
                    start: document.start,
                    end: document.end,
                    length,
                });
            }
            units.extend((0..kv_heads).map(|kv_head| Unit {
                document: document.clone(),
                kv_head,
            }));
        }
        units.sort_by_cached_key(|unit| {
            let len = unit.document.len();
            let cost: usize = query_tiles(len)
                .map(|tile| query_tile_cost(len, tile, options.mask))
                .sum();
            std::cmp::Reverse(cost)
        });
        Ok(Self {
            options,
            rows,
            heads,
            kv_heads,
            head_dim,
            units,
        })
    }

    /// Query heads per key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The query heads that read a unit's keys.
    fn query_heads(&self, unit: &Unit) -> Range<usize> {
        unit.kv_head * self.group()..(unit.kv_head + 1) * self.group()
    }

    fn scale(&self) -> f64 {
        self.options.softmax_scale(self.head_dim)
    }

    /// The block-scaled rounding of the call.
    fn low_bit(&self, qkv: [&dyn Source<f32>; 3], d_o: Option<&dyn Source<f32>>) -> LowBit {
        let maxima = (self.options.ablate == Some(Ablation::PerTensor)).then(|| {
            let [q, k, v] = qkv;
            TensorMaxima {
                q: self.tensor_amax(q, self.heads, Role::Query),
                k: self.tensor_amax(k, self.kv_heads, Role::Key),
                v: self.tensor_amax(v, self.kv_heads, Role::Value),
                d_o: d_o.map_or(0.0, |d_o| {
                    self.tensor_amax(d_o, self.heads, Role::OutputGradient)
                }),
            }
        });
        LowBit::new(self.options, maxima)
    }

    /// The largest magnitude of a whole tensor, rotated as products read it.
    fn tensor_amax(&self, source: &dyn Source<f32>, heads: usize, role: Role) -> f32 {
        let mut amax = 0.0f32;
        for unit in self.units.iter().filter(|unit| unit.kv_head == 0) {
            for head in 0..heads {
                let mut rows = self.gather(source, head, unit);
                if self.rotates(role) {
                    let dim = rows.dim;
                    rotate(rows.unpadded_mut(), dim);
                }
                // f32::max would leave a NaN out, which has to poison the tensor.
                for x in &rows.data {
                    amax = if x.is_nan() || amax.is_nan() {
                        f32::NAN
                    } else {
                        amax.max(x.abs())
                    };
                }
            }
        }
        amax
    }

    /// Only Q and K are rotated.
    fn rotates(&self, role: Role) -> bool {
        matches!(role, Role::Query | Role::Key) && self.options.rotates(self.head_dim)
    }

    /// One head of a unit's document, as products read it.
    fn load<B: Backend>(
        &self,
        backend: &B,
        source: &dyn Source<B::Real>,
        head: usize,
        unit: &Unit,
        role: Role,
    ) -> B::Loaded {
        dispatch(Prepare {
            scheme: backend,
            rows: self.gather(source, head, unit),
            role,
            rotate: self.rotates(role),
        })
    }

    fn gather<R: Real>(&self, source: &dyn Source<R>, head: usize, unit: &Unit) -> Rows<R> {
        let mut rows = Rows::zeros(unit.document.len(), self.head_dim);
        source.gather(head, unit.document.start, rows.unpadded_mut());
        rows
    }

    fn load_keys<B: Backend>(
        &self,
        backend: &B,
        k: &dyn Source<B::Real>,
        v: &dyn Source<B::Real>,
        unit: &Unit,
    ) -> B::KeysValues {
        backend.keys_values(
            self.load(backend, k, unit.kv_head, unit, Role::Key),
            self.load(backend, v, unit.kv_head, unit, Role::Value),
        )
    }

    fn forward<B: Backend>(
        &self,
        backend: &B,
        q: &dyn Source<B::Real>,
        k: &dyn Source<B::Real>,
        v: &dyn Source<B::Real>,
    ) -> Vec<Tile<B::Real>> {
        let unit_tiles = |unit: &Unit| {
            let kv = self.load_keys(backend, k, v, unit);
            let mut outputs = Vec::new();
            for head in self.query_heads(unit) {
                let q = self.load(backend, q, head, unit, Role::Query);
                let tiles: Vec<_> = query_tiles(unit.document.len()).collect();
                outputs.par_extend(tiles.into_par_iter().map(|queries| {
                    let start = unit.document.start + queries.start;
                    let rows = start..start + queries.len();
                    let output = backend.attend(&q, &kv, queries, self.options.mask, self.scale());
                    (head, rows, output)
                }));
            }
            outputs
        };
        self.units
            .par_iter()
            .with_max_len(1)
            .flat_map_iter(unit_tiles)
            .collect()
    }

    /// The gradients of every unit, in the order of the units.
    fn backward<B: Backend>(
        &self,
        backend: &B,
        saved: Saved<B::Real>,
        k: &dyn Source<B::Real>,
        v: &dyn Source<B::Real>,
    ) -> Vec<UnitGradients<B::Real>> {
        self.units
            .par_iter()
            .with_max_len(1)
            .map(|unit| self.unit_gradients(backend, saved, k, v, unit))
            .collect()
    }

    fn unit_gradients<B: Backend>(
        &self,
        backend: &B,
        saved: Saved<B::Real>,
        k: &dyn Source<B::Real>,
        v: &dyn Source<B::Real>,
        unit: &Unit,
    ) -> UnitGradients<B::Real> {
        let kv = self.load_keys(backend, k, v, unit);
        let heads = self
            .query_heads(unit)
            .map(|head| SavedHead {
                head,
                q: self.load(backend, saved.q, head, unit, Role::Query),
                d_o: self.load(backend, saved.d_o, head, unit, Role::OutputGradient),
                o: self.gather(saved.o, head, unit),
                lse: saved.lse[head * self.rows..][unit.document.clone()].to_vec(),
            })
            .collect();
        let mut gradients = backend.gradients(&kv, heads, self.options.mask, self.scale());

        let rotate = self.options.rotates(self.head_dim);
        let (scale, one) = (B::Real::from_f64(self.scale()), B::Real::from_f64(1.0));
        let UnitGradients { dq, dk, dv, .. } = &mut gradients;
        for rows in dq.iter_mut().chain([dk]) {
            dispatch(Finish {
                scheme: backend,
                rows,
                scale,
                rotate,
            });
        }
        dispatch(Finish {
            scheme: backend,
            rows: dv,
            scale: one,
            rotate: false,
        });
        gradients
    }

    fn collect_forward<R: Real, E: Element>(
        &self,
        tiles: Vec<Tile<R>>,
    ) -> (Forward<E>, StatsSnapshot) {
        let mut counts = StatsSnapshot::default();
        let mut o = vec![E::default(); self.rows * self.heads * self.head_dim];
        let mut lse = vec![E::Real::INFINITY; self.heads * self.rows];
        for (head, rows, tile) in tiles {
            counts.saturated += tile.saturated;
            scatter(
                &tile.o,
                &mut o,
                head,
                self.heads,
                self.head_dim,
                rows.clone(),
            );
            let lse = &mut lse[head * self.rows..][rows];
            for (lse, value) in lse.iter_mut().zip(tile.lse) {
                *lse = E::Real::from_f64(value.to_f64());
            }
        }
        (Forward { o, lse }, counts)
    }

    fn collect_backward<R: Real, E: Element>(
        &self,
        units: Vec<UnitGradients<R>>,
    ) -> (Gradients<E>, StatsSnapshot) {
        let mut counts = StatsSnapshot::default();
        let zeros = |heads: usize| vec![E::default(); self.rows * heads * self.head_dim];
        let [mut dq, mut dk, mut dv] = [self.heads, self.kv_heads, self.kv_heads].map(zeros);
        for (unit, gradients) in self.units.iter().zip(units) {
            counts += gradients.counts;
            let (rows, dim) = (&unit.document, self.head_dim);
            for (head, from) in self.query_heads(unit).zip(&gradients.dq) {
                scatter(&from.data, &mut dq, head, self.heads, dim, rows.clone());
            }
            for (from, to) in [(&gradients.dk, &mut dk), (&gradients.dv, &mut dv)] {
                scatter(
                    &from.data,
                    to,
                    unit.kv_head,
                    self.kv_heads,
                    dim,
                    rows.clone(),
                );
            }
        }
        (Gradients { dq, dk, dv }, counts)
    }
}

/// Writes the rows of one head into a contiguous `[rows, heads, head_dim]` tensor.
fn scatter<R: Real, E: Element>(
    from: &[R],
    to: &mut [E],
    head: usize,
    heads: usize,
    head_dim: usize,
    rows: Range<usize>,
) {
    for (row, values) in rows.zip(from.chunks_exact(head_dim)) {
        let to = &mut to[(row * heads + head) * head_dim..][..head_dim];
        for (to, value) in to.iter_mut().zip(values) {
            *to = E::from_real(*value);
        }
    }
}
