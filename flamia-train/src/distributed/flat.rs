//! Parameters laid one after another in buckets, so that one operation sends many, and each rank keeps an
//! equal part of every bucket.

use std::ops::Range;

use flamia_autograd::distributed::Member;
use flamia_autograd::place_leaf;
use tch::{Kind, TchError, Tensor, no_grad};

use crate::model::Params;

/// Floats whose multiples parameters and parts begin at: 256 bytes, as torch's own tensors do.
const ALIGNMENT: usize = 64;

/// Where a parameter lies in its bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The parameter, by its place in the model's order.
    pub param: usize,
    /// Its first float in the bucket.
    pub start: usize,
    /// Its floats.
    pub len: usize,
}

/// A bucket before it exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its parameters.
    pub places: Vec<Place>,
    /// Its floats, gaps included: equal parts for all ranks.
    pub len: usize,
}

/// The part of a parameter that lies in a rank's part of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The parameter.
    pub param: usize,
    /// Where it lies in the bucket.
    pub range: Range<usize>,
}

impl Plan {
    /// The part of `member`.
    pub fn part(&self, member: Member) -> Range<usize> {
        let len = self.len / member.world;
        member.rank * len..(member.rank + 1) * len
    }

    /// What of the parameters lies in `part`, in order.
    pub fn pieces(&self, part: &Range<usize>) -> Vec<Piece> {
        let cut = |place: &Place| {
            let range = place.start.max(part.start)..(place.start + place.len).min(part.end);
            (!range.is_empty()).then_some(Piece {
                param: place.param,
                range,
            })
        };
        self.places.iter().filter_map(cut).collect()
    }
}

/// Buckets of at least `least` floats, but for the last, for parameters of these `sizes`. The last parameter
/// comes first: its gradient is whole first.
pub fn plan(sizes: &[usize], least: usize, world: usize) -> Vec<Plan> {
    let mut plans = Vec::new();
    let (mut places, mut len) = (Vec::new(), 0usize);
    for (param, &size) in sizes.iter().enumerate().rev() {
        places.push(Place {
            param,
            start: len,
            len: size,
        });
        len = (len + size).next_multiple_of(ALIGNMENT);
        if len >= least || param == 0 {
            plans.push(Plan {
                places: std::mem::take(&mut places),
                len: std::mem::take(&mut len).next_multiple_of(ALIGNMENT * world),
            });
        }
    }
    plans
}

/// Weights and gradients of some parameters, which live in these tensors.
#[derive(Debug)]
pub struct Bucket {
    /// What lies where.
    pub plan: Plan,
    /// The weights, Float `[len]`, zeros in the gaps.
    pub weights: Tensor,
    /// The gradients, likewise.
    pub grads: Tensor,
}

impl Bucket {
    /// Moves all of `params`, with their values, into buckets of at least `least` floats. Gradients that
    /// they had are dropped.
    ///
    /// # Errors
    /// When the buckets cannot be allocated.
    pub fn all(params: &mut Params, least: usize, world: usize) -> Result<Vec<Self>, TchError> {
        let sizes: Vec<usize> = params.iter().map(|(_, param)| param.numel()).collect();
        let mut leaves: Vec<&mut Tensor> = params.iter_mut().map(|(_, param)| param).collect();
        plan(&sizes, least, world)
            .into_iter()
            .map(|plan| {
                let options = (Kind::Float, leaves[plan.places[0].param].device());
                let zeros = || Tensor::f_zeros([plan.len as i64], options);
                let (weights, grads) = (zeros()?, zeros()?);
                for place in &plan.places {
                    let leaf = &mut leaves[place.param];
                    let shape = leaf.size();
                    let at = |flat: &Tensor| {
                        slice(flat, &(place.start..place.start + place.len))?.f_view(&shape[..])
                    };
                    no_grad(|| at(&weights)?.f_copy_(leaf).map(drop))?;
                    place_leaf(leaf, &at(&weights)?, &at(&grads)?)?;
                }
                Ok(Self {
                    plan,
                    weights,
                    grads,
                })
            })
            .collect()
    }
}

/// A view of some floats of a bucket.
pub fn slice(flat: &Tensor, range: &Range<usize>) -> Result<Tensor, TchError> {
    flat.f_narrow(0, range.start as i64, range.len() as i64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_float_is_one_ranks(
            sizes in prop::collection::vec(1usize..1000, 1..20),
            least in 1usize..3000,
            world in 1usize..9,
        ) {
            let plans = plan(&sizes, least, world);
            let mut seen: Vec<Vec<u32>> = sizes.iter().map(|&size| vec![0; size]).collect();
            let mut order = Vec::new();
            for plan in &plans {
                order.extend(plan.places.iter().map(|place| place.param));
                for rank in 0..world {
                    let part = plan.part(Member { rank, world });
                    prop_assert_eq!(part.len() * world, plan.len);
                    for Piece { param, range } in plan.pieces(&part) {
                        prop_assert!(range.start >= part.start && range.end <= part.end);
                        let place = plan.places.iter().find(|place| place.param == param).unwrap();
                        for float in range {
                            seen[param][float - place.start] += 1;
                        }
                    }
                }
                for pair in plan.places.windows(2) {
                    prop_assert!(pair[0].start + pair[0].len <= pair[1].start);
                    prop_assert_eq!(pair[1].start % ALIGNMENT, 0);
                }
            }
            prop_assert!(seen.iter().flatten().all(|&times| times == 1));
            prop_assert_eq!(order, (0..sizes.len()).rev().collect::<Vec<_>>());
            for plan in &plans[..plans.len() - 1] {
                prop_assert!(plan.len >= least);
                let all_but_last = &plan.places[..plan.places.len() - 1];
                let before: usize = all_but_last.iter().map(|place| place.len).sum();
                prop_assert!(before < least, "closed too late");
            }
        }
    }
}
