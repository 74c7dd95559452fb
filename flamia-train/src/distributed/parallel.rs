//! A step that several ranks do together.

use flamia_autograd::distributed::Member;
use tch::{Device, Tensor};

use super::flat::Bucket;
use super::gradients::Reducer;
use super::shards::Shards;
use super::team::{Team, TeamError};
use crate::attention::Attention;
use crate::batch::MicroBatch;
use crate::loss::Loss;
use crate::model::Model;
use crate::optim::{AdamW, Guard};
use crate::step::{LaunchedStep, StepError, accumulate};

/// This rank's side of the steps.
#[derive(Debug)]
pub struct DataParallel {
    member: Member,
    buckets: Vec<Bucket>,
    reducer: Reducer,
    shards: Shards,
}

impl DataParallel {
    /// Lays `model` out for `team`, gives all ranks the weights of rank 0, and takes this rank's part of
    /// `optimizer`. At least `bucket_bytes` of gradients are sent at once.
    ///
    /// # Errors
    /// [`TeamError`], for one when torch has no NCCL for a model on a GPU.
    pub fn new(
        team: &Team,
        model: &mut Model,
        optimizer: &AdamW,
        device: Device,
        bucket_bytes: usize,
    ) -> Result<Self, TeamError> {
        let member = team.member();
        let group = team.group(device)?;
        let buckets = Bucket::all(
            &mut model.params,
            bucket_bytes / size_of::<f32>(),
            member.world,
        )?;
        for bucket in &buckets {
            group.broadcast(&bucket.weights, 0)?.wait()?;
        }
        let shards = Shards::of(optimizer, &model.params, &buckets, member)?;
        let reducer = Reducer::new(group, &model.params, &buckets, member)?;
        Ok(Self {
            member,
            buckets,
            reducer,
            shards,
        })
    }

    /// Trains `model` on the micro-batches of this rank, of a step whose loss is summed over `counts` on all ranks
    /// together. Returns, where a GPU computes, before the step is done.
    ///
    /// Attention rounds at random, where it does, as belongs to the count of steps and to the place of a
    /// micro-batch among those of all ranks.
    ///
    /// # Errors
    /// [`StepError`]. Losses and gradients that are not finite on any rank leave the update out on all.
    pub fn launch_step(
        &mut self,
        model: &mut Model,
        batches: &[MicroBatch],
        counts: Loss,
        attention: &Attention,
        lr: f64,
        max_norm: f64,
    ) -> Result<LaunchedStep, StepError> {
        for bucket in &mut self.buckets {
            let _ = bucket.grads.f_zero_()?;
        }
        let step = self.shards.step_count();
        let first = self.member.rank * batches.len();
        let numbered: Vec<(usize, &MicroBatch)> = (first..).zip(batches).collect();
        let last = first + batches.len() - 1;
        let nats = accumulate(&numbered, counts.tokens, |&(number, batch)| {
            let loss = batch.summed_loss(model, &attention.at(step, number as u64))?;
            if number == last {
                self.reducer.before_last_backward();
            }
            Ok(loss)
        })?;
        self.reducer.wait()?;
        let squares = self.shards.squared_norm(&self.buckets)?;
        let sums = Tensor::f_stack(&[nats, squares], 0)?;
        let Self {
            reducer,
            shards,
            buckets,
            ..
        } = self;
        reducer.with_group(|group| {
            group.all_reduce(&sums)?.wait()?;
            let (nats, norm) = (sums.f_get(0)?, sums.f_get(1)?.f_sqrt()?);
            let guard = Guard::new(&nats, &norm, max_norm)?;
            shards.update(&model.params, buckets, group, lr, &guard)?;
            Ok(LaunchedStep::new(counts, nats, norm)?)
        })
    }

    /// The optimiser as one process would have it, on rank 0. Every rank has to call this.
    ///
    /// # Errors
    /// [`StepError`].
    pub fn whole_optimizer(&self, model: &Model) -> Result<Option<AdamW>, StepError> {
        self.reducer
            .with_group(|group| self.shards.whole(&model.params, &self.buckets, group))
    }
}
