//! AdamW of which each rank keeps and updates one part.

use flamia_autograd::distributed::{Group, Member};
use flamia_autograd::leaf_changed;
use tch::{Device, Kind, TchError, Tensor, no_grad};

use super::flat::{Bucket, slice};
use crate::model::Params;
use crate::optim::{AdamW, Guard, Slot};
use crate::step::StepError;

/// This rank's part of the optimiser.
#[derive(Debug)]
pub struct Shards {
    /// Over `slots`, whose moments are pieces of `moments`.
    adamw: AdamW,
    slots: Vec<Slot>,
    /// First and second moments of this rank's part of each bucket.
    moments: Vec<[Tensor; 2]>,
    member: Member,
}

impl Shards {
    /// Takes this rank's part of `whole`, the optimiser of `params`, which live in `buckets`.
    ///
    /// # Errors
    /// When the part cannot be allocated.
    pub fn of(
        whole: &AdamW,
        params: &Params,
        buckets: &[Bucket],
        member: Member,
    ) -> Result<Self, TchError> {
        let decays: Vec<bool> = params.iter().map(|(_, param)| param.dim() >= 2).collect();
        let (mut slots, mut pairs, mut moments) = (Vec::new(), Vec::new(), Vec::new());
        for Bucket {
            plan,
            weights,
            grads,
        } in buckets
        {
            let part = plan.part(member);
            let flat = || weights.f_zeros_like();
            let all = [flat()?, flat()?];
            for place in &plan.places {
                let range = place.start..place.start + place.len;
                for (flat, moment) in all.iter().zip(whole.moments_of(place.param)) {
                    no_grad(|| {
                        slice(flat, &range)?
                            .f_copy_(&moment.f_reshape([-1])?)
                            .map(drop)
                    })?;
                }
            }
            let mine = [
                copied(&slice(&all[0], &part)?)?,
                copied(&slice(&all[1], &part)?)?,
            ];
            for piece in plan.pieces(&part) {
                let within = piece.range.start - part.start..piece.range.end - part.start;
                slots.push(Slot {
                    weight: slice(weights, &piece.range)?,
                    grad: slice(grads, &piece.range)?,
                    decays: decays[piece.param],
                });
                pairs.push([slice(&mine[0], &within)?, slice(&mine[1], &within)?]);
            }
            moments.push(mine);
        }
        Ok(Self {
            adamw: whole.with_moments(pairs),
            slots,
            moments,
            member,
        })
    }

    /// Updates done or left out.
    pub fn step_count(&self) -> u64 {
        self.adamw.step_count()
    }

    /// The squared norm of this rank's gradients: a Double of shape `[]` that the host has not waited for.
    ///
    /// # Errors
    /// When torch refuses.
    pub fn squared_norm(&self, buckets: &[Bucket]) -> Result<Tensor, TchError> {
        no_grad(|| {
            let norms = buckets
                .iter()
                .map(|bucket| slice(&bucket.grads, &bucket.plan.part(self.member))?.f_norm())
                .collect::<Result<Vec<_>, TchError>>()?;
            Tensor::f_stack(&norms, 0)?
                .f_to_kind(Kind::Double)?
                .f_square()?
                .f_sum(Kind::Double)
        })
    }

    /// Updates this rank's part of the weights, as far as `guard` allows, and gets the others'.
    ///
    /// # Errors
    /// [`StepError`].
    pub fn update(
        &mut self,
        params: &Params,
        buckets: &[Bucket],
        group: &Group,
        lr: f64,
        guard: &Guard,
    ) -> Result<(), StepError> {
        self.adamw.update_slots(&mut self.slots, lr, guard)?;
        let works = buckets
            .iter()
            .map(|bucket| {
                let mine = slice(&bucket.weights, &bucket.plan.part(self.member))?;
                Ok(group.all_gather(&bucket.weights, &mine)?)
            })
            .collect::<Result<Vec<_>, StepError>>()?;
        for work in works {
            work.wait()?;
        }
        Ok(params
            .iter()
            .try_for_each(|(_, param)| leaf_changed(param))?)
    }

    /// The whole optimiser, on the host of rank 0, as one process would have it: for a checkpoint. Every rank has
    /// to call this.
    ///
    /// # Errors
    /// [`StepError`].
    pub fn whole(
        &self,
        params: &Params,
        buckets: &[Bucket],
        group: &Group,
    ) -> Result<Option<AdamW>, StepError> {
        let leads = self.member.rank == 0;
        let shapes: Vec<Vec<i64>> = params.iter().map(|(_, param)| param.size()).collect();
        let mut whole: Vec<Option<[Tensor; 2]>> = shapes.iter().map(|_| None).collect();
        for (bucket, mine) in buckets.iter().zip(&self.moments) {
            let mut all = Vec::new();
            for mine in mine {
                let flat = bucket.weights.f_zeros_like()?;
                group.all_gather(&flat, mine)?.wait()?;
                if leads {
                    all.push(flat.f_to_device(Device::Cpu)?);
                }
            }
            let [first, second] = &all[..] else { continue };
            for place in &bucket.plan.places {
                let of = |flat: &Tensor| {
                    slice(flat, &(place.start..place.start + place.len))?
                        .f_view(&shapes[place.param][..])
                };
                whole[place.param] = Some([of(first)?, of(second)?]);
            }
        }
        Ok(leads.then(|| self.adamw.with_moments(whole.into_iter().flatten())))
    }
}

/// A copy, which keeps nothing else alive.
fn copied(tensor: &Tensor) -> Result<Tensor, TchError> {
    let mut copy = tensor.f_zeros_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
