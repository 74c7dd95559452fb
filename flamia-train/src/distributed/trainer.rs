//! What a trainer does otherwise when it is one of several.

use std::time::Instant;

use super::share::share;
use super::team::TeamError;
use crate::batch::MicroBatch;
use crate::error::{TrainError, chain};
use crate::loss::Loss;
use crate::step::StepError;
use crate::trainer::{Launched, Outcome, Trainer};

impl Trainer {
    /// Whether the run is to stop: all ranks if one was asked to.
    pub(crate) fn stopping(&self) -> Result<bool, TrainError> {
        let asked = self.stop.asked();
        let Some(team) = &self.team else {
            return Ok(asked);
        };
        let [asked] = team.sums([f64::from(u8::from(asked))])?;
        Ok(asked > 0.0)
    }

    /// The loss of all validation rows, of which each rank has its own; `None` if any was asked to stop
    /// meanwhile.
    pub(crate) fn whole_loss(&self, mine: Option<Loss>) -> Result<Option<Loss>, TrainError> {
        let Some(team) = &self.team else {
            return Ok(mine);
        };
        let part = mine.unwrap_or_default();
        let stopped = f64::from(u8::from(mine.is_none()));
        let numbers = [part.nats, part.tokens as f64, part.bytes as f64, stopped];
        let [nats, tokens, bytes, stopped] = team.sums(numbers)?;
        Ok((stopped == 0.0).then_some(Loss {
            nats,
            tokens: tokens as u64,
            bytes: bytes as u64,
        }))
    }

    /// Reads a global batch, and launches the step of it on this rank's share; rows and operations are those of
    /// the whole.
    pub(crate) fn launch_share(&mut self, lr: f64) -> Result<Launched, TrainError> {
        let start = Instant::now();
        let (mut rows, mut kept) = (Vec::new(), Vec::new());
        for _ in 0..self.settings.batch.accumulate {
            let (some, some_kept) = self.next_rows()?;
            rows.extend(some);
            kept.push(some_kept);
        }
        let (Some(team), Some(parallel)) = (&self.team, &mut self.parallel) else {
            unreachable!("only one of several ranks has a share");
        };
        team.doing(&format!("step {}", self.state.step + 1));
        self.meter.packing.add(&rows);
        let (shape, mask) = (&self.model.shape, self.settings.kernel.mask());
        let share = share(rows, shape, mask, team.member())?;
        let micro_batches = share
            .rows
            .chunks(self.settings.batch.rows)
            .map(|rows| Ok(MicroBatch::new(rows, self.device)?))
            .collect::<Result<Vec<_>, TrainError>>()?;
        self.meter.data_seconds += start.elapsed().as_secs_f64();
        let flops = shape.training_flops(share.counts.tokens, share.pairs);
        self.meter.count(share.counts.tokens, flops);
        let launched = parallel.launch_step(
            &mut self.model,
            &micro_batches,
            share.counts,
            &self.attention,
            lr,
            self.settings.optim.clip,
        );
        let launched = launched.map_err(|source| TrainError::Step {
            step: self.state.step + 1,
            source,
        })?;
        Ok((launched, kept, flops))
    }

    /// Writes a checkpoint: rank 0, with what the others have of the optimiser.
    pub(crate) fn write_checkpoint(&mut self) -> Result<(), TrainError> {
        let (state, params) = (&self.state, &self.model.params);
        let (Some(team), Some(parallel)) = (&self.team, &self.parallel) else {
            self.checkpoints.save(state, params, &self.optimizer)?;
            return Ok(());
        };
        team.doing(&format!("saving after step {}", state.step));
        let whole = parallel.whole_optimizer(&self.model);
        let whole = whole.map_err(|source| TrainError::Step {
            step: state.step,
            source,
        })?;
        if let Some(whole) = whole {
            self.checkpoints.save(state, params, &whole)?;
        }
        Ok(())
    }

    /// Whether the state can be saved after `error`: among several ranks only where all have the same
    /// error, as saving takes all of them.
    pub(crate) fn can_save_after(&self, error: &TrainError) -> bool {
        let is_everybodys = matches!(
            error,
            TrainError::NotFinite { .. }
                | TrainError::Step {
                    source: StepError::NoLabels,
                    ..
                }
        );
        self.team.is_none() || is_everybodys
    }
}

/// Parts from the others, who learn of an error.
pub(crate) fn part(
    team: Option<super::Team>,
    outcome: Result<Outcome, TrainError>,
) -> Result<Outcome, TrainError> {
    match (team, outcome) {
        (None, outcome) => outcome,
        (Some(team), Ok(outcome)) => {
            team.leave()?;
            Ok(outcome)
        }
        (Some(team), Err(error)) => {
            team.fail(&chain(&error), is_operation(&error));
            Err(error)
        }
    }
}

/// Whether an operation of several ranks failed, most often for another's sake.
pub(crate) fn is_operation(error: &TrainError) -> bool {
    matches!(
        error,
        TrainError::Team(TeamError::Distributed(_))
            | TrainError::Step {
                source: StepError::Distributed(_),
                ..
            }
    )
}
