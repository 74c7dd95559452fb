//! Units of `reference` and of the block-scaled paths.

use std::ops::Range;

use flamia_sched::Mask;
use rayon::prelude::*;

use super::backward::{HeadGradients, KeysValues, QueryHead};
use super::forward::{QueryTile, TileOutput};
use super::operands::{Panels, Prepared, Rows};
use super::real::Real;
use super::scheme::BlockScheme;
use super::simd::dispatch;
use super::unit::{Backend, SavedHead, UnitGradients};

impl<S: BlockScheme> Backend for S {
    type KeysValues = KeysValues<S::Real>;

    fn keys_values(&self, k: Prepared<S::Real>, v: Prepared<S::Real>) -> KeysValues<S::Real> {
        let (k_panels, v_panels) = (Panels::new(&k.dim), Panels::new(&v.dim));
        let per_key = v.per_key.as_ref().and_then(|per_key| per_key.dim.as_ref());
        let v_per_key_panels = per_key.map(Panels::new);
        KeysValues {
            k,
            v,
            k_panels,
            v_panels,
            v_per_key_panels,
        }
    }

    fn attend(
        &self,
        q: &Prepared<S::Real>,
        kv: &KeysValues<S::Real>,
        queries: Range<usize>,
        mask: Mask,
        scale: f64,
    ) -> TileOutput<S::Real> {
        dispatch(QueryTile {
            scheme: self,
            q,
            kv,
            queries,
            mask,
            scale: S::Real::from_f64(scale * std::f64::consts::LOG2_E),
        })
    }

    fn gradients(
        &self,
        kv: &KeysValues<S::Real>,
        heads: Vec<SavedHead<S>>,
        mask: Mask,
        scale: f64,
    ) -> UnitGradients<S::Real> {
        let parts: Vec<HeadGradients<S::Real>> = heads
            .par_iter()
            .map(|head| {
                let SavedHead {
                    head,
                    q,
                    d_o,
                    o,
                    lse,
                } = head;
                dispatch(QueryHead {
                    scheme: self,
                    kv,
                    head: *head,
                    q,
                    d_o,
                    o,
                    lse,
                    mask,
                    scale,
                })
            })
            .collect();
        // dK and dV are summed over the group in the order of its heads.
        let mut sum = UnitGradients {
            dq: Vec::with_capacity(parts.len()),
            dk: Rows::zeros(kv.k.dim.len, kv.k.dim.dim),
            dv: Rows::zeros(kv.k.dim.len, kv.k.dim.dim),
            counts: Default::default(),
        };
        for part in parts {
            sum.dq.push(part.dq);
            add(&mut sum.dk, &part.dk);
            add(&mut sum.dv, &part.dv);
            sum.counts += part.counts;
        }
        sum
    }
}

fn add<R: Real>(sum: &mut Rows<R>, part: &Rows<R>) {
    for (sum, part) in sum.data.iter_mut().zip(&part.data) {
        *sum += *part;
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Baseline, Task};
    use super::*;
    use crate::cpu::low_bit::LowBit;
    use crate::cpu::operands::{Prepare, Role};
    use crate::options::{Options, Path};

    /// A whole tile and a whole head give the same bits with and without vector instructions.
    #[test]
    fn the_instruction_set_does_not_show() {
        for path in [Path::Mxfp8, Path::Nvfp4, Path::Fp4] {
            check(&LowBit::new(&Options::new(path, Mask::Causal), None));
            check(&LowBit::new(
                &Options::new(path, Mask::Causal).exact(),
                None,
            ));
        }
    }

    fn check(scheme: &LowBit) {
        let (len, dim) = (150, 64);
        let rows = |seed: usize, role: Role| {
            let mut rows = Rows::zeros(len, dim);
            for (i, x) in rows.unpadded_mut().iter_mut().enumerate() {
                *x = ((i * 7919 + seed) as f32 * 0.618).sin() * 2.0;
            }
            Prepare {
                scheme,
                rows,
                role,
                rotate: true,
            }
        };
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let prepared = |seed, role| {
            let fast = dispatch(rows(seed, role));
            let plain = rows(seed, role).run::<Baseline>();
            for per_key in [false, true] {
                let [fast, plain] = [&fast, &plain].map(|x| bits(&x.over_tokens(per_key).0.data));
                assert!(fast == plain);
            }
            assert!(bits(&fast.dim.data) == bits(&plain.dim.data));
            fast
        };
        let q = &prepared(1, Role::Query);
        let d_o = &prepared(2, Role::OutputGradient);
        let kv = &scheme.keys_values(prepared(3, Role::Key), prepared(4, Role::Value));
        let mask = Mask::Causal;
        let tile = || QueryTile {
            scheme,
            q,
            kv,
            queries: 0..128,
            mask,
            scale: 0.18,
        };
        let (fast, plain) = (dispatch(tile()), tile().run::<Baseline>());
        assert!(bits(&fast.o) == bits(&plain.o));
        assert!(bits(&fast.lse) == bits(&plain.lse));

        let (mut o, mut lse) = (Rows::zeros(len, dim), fast.lse);
        o.data[..128 * dim].copy_from_slice(&fast.o);
        lse.resize(len, 5.0);
        let (o, lse) = (&o, &lse);
        let head = || QueryHead {
            scheme,
            kv,
            head: 3,
            q,
            d_o,
            o,
            lse,
            mask,
            scale: 0.125,
        };
        let (fast, plain) = (dispatch(head()), head().run::<Baseline>());
        for (fast, plain) in [
            (&fast.dq, &plain.dq),
            (&fast.dk, &plain.dk),
            (&fast.dv, &plain.dv),
        ] {
            assert!(bits(&fast.data) == bits(&plain.data));
            assert!(fast.data.iter().any(|x| *x != 0.0));
        }
    }
}
