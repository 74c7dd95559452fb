//! The training loop, to be read top to bottom: evaluate, checkpoint, step, log.
//!
//! Between two steps the run's whole state is the weights, AdamW's moments and a [`TrainState`];
//! a checkpoint is exactly that. On one device with one number of threads, a run that is stopped
//! and resumed anywhere ends with the same bits as one that never stopped.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Instant;

use datasets::{PrefetchedRows, Row};
use tch::Device;

use crate::attention::Attention;
use crate::batch::MicroBatch;
use crate::board::Board;
use crate::checkpoint::{Saver, TrainState};
use crate::curves::{TOKENS, TRAIN_LOSS, VAL_LOSS};
use crate::data::DataError;
use crate::distributed::{DataParallel, Team, part};
use crate::error::{TrainError, chain};
use crate::evaluate::evaluate;
use crate::guard::{KeptRow, ReadStep, Watch};
use crate::meter::Meter;
use crate::model::Model;
use crate::optim::AdamW;
use crate::plot::{Series, Style, loss_svg};
use crate::run_folder::RunFolder;
use crate::schedule::Schedule;
use crate::settings::Settings;
use crate::step::{LaunchedStep, StepReport, launch_step};
use crate::stop::Stop;
use crate::summary::RunSummary;
use crate::terminal::Progress;

/// The unit of every loss that is reported.
pub const UNIT: &str = "nats/byte";

/// How a run ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// It was asked to stop, and saved.
    Stopped,
}

/// Steps that a GPU may be given before one of them is looked at: as many rows are kept for reports.
const MOST_UNREAD: usize = 64;

/// A step that was launched and not looked at yet.
pub(crate) struct Unread {
    /// From 1.
    step: u64,
    lr: f64,
    launched: LaunchedStep,
    batch: Vec<Vec<KeptRow>>,
}

/// A step that was launched, its rows by micro-batch, and its operations.
pub(crate) type Launched = (LaunchedStep, Vec<Vec<KeptRow>>, f64);

/// A run, ready to go on.
pub struct Trainer {
    /// Before the folder: what is being written is in place before another process may have the run.
    pub(crate) checkpoints: Saver,
    pub(crate) settings: Settings,
    pub(crate) folder: RunFolder,
    pub(crate) stop: Stop,
    pub(crate) device: Device,
    pub(crate) model: Model,
    pub(crate) optimizer: AdamW,
    pub(crate) schedule: Schedule,
    pub(crate) attention: Attention,
    pub(crate) rows: PrefetchedRows,
    pub(crate) validation: Vec<MicroBatch>,
    pub(crate) data_counts: BTreeMap<String, u64>,
    pub(crate) state: TrainState,
    /// The step of the newest checkpoint, or of the one that is being written.
    pub(crate) saved: Option<u64>,
    pub(crate) board: Board,
    pub(crate) progress: Progress,
    /// When `state.seconds` was last brought up to date.
    pub(crate) clock: Instant,
    pub(crate) watch: Watch,
    /// The steps that were launched last, until their outcomes are read.
    pub(crate) unread: Vec<Unread>,
    /// Work since the last point of TensorBoard's.
    pub(crate) meter: Meter,
    /// Label tokens since the progress was last shown.
    pub(crate) unshown: usize,
    /// The longest that a checkpoint kept the steps waiting, in seconds.
    pub(crate) longest_pause: Option<f64>,
    /// The BF16 rate of all devices, if known.
    pub(crate) peak_tflops: Option<f64>,
    /// The ranks, if this is one of several,
    pub(crate) team: Option<Team>,
    /// and this one's side of their steps, which has the optimiser's state then.
    pub(crate) parallel: Option<DataParallel>,
}

impl Trainer {
    /// Trains until the last step or until asked to stop, and leaves the run's checkpoint, summary
    /// and plot in its folder.
    ///
    /// # Errors
    /// [`TrainError`]; the last good state is saved first, whenever that is possible.
    pub fn run(mut self) -> Result<Outcome, TrainError> {
        let outcome = self.train();
        let saved = self.checkpoints.wait();
        if let (Err(_), Err(error)) = (&outcome, &saved) {
            // What ended the run is told by the caller.
            self.progress.warn(&chain(error));
        }
        let outcome = outcome.and_then(|outcome| {
            saved?;
            Ok(outcome)
        });
        let team = self.team.take();
        match outcome {
            Ok(outcome) if team.as_ref().is_none_or(Team::leads) => {
                part(team, self.finish().map(|()| outcome))
            }
            Err(_) => {
                // An operation may be under way that never ends: nothing waits for it.
                std::mem::forget(self.parallel.take());
                part(team, outcome)
            }
            Ok(_) => part(team, outcome),
        }
    }

    fn train(&mut self) -> Result<Outcome, TrainError> {
        let steps = self.settings.steps as u64;
        loop {
            self.evaluate()?;
            // Asked once: a signal after this is the next turn's, which saves before it leaves.
            let stopping = self.stopping()?;
            let done = self.state.step >= steps;
            self.checkpoint(stopping || done)?;
            if stopping {
                return Ok(Outcome::Stopped);
            }
            if done {
                return Ok(Outcome::Finished);
            }
            if let Err(error) = self.step().and_then(|()| self.log()) {
                if self.can_save_after(&error) {
                    self.save()?;
                }
                return Err(error);
            }
        }
    }

    /// Measures the validation loss when it is due: before the first step, at the settings'
    /// cadence and after the last step.
    fn evaluate(&mut self) -> Result<(), TrainError> {
        let step = self.state.step;
        let known = self
            .state
            .validation
            .last
            .is_some_and(|last| last.step == step);
        if !self.evaluation_is_due() || known {
            return Ok(());
        }
        let loss = evaluate(&self.model, &self.validation, &self.attention, &self.stop)
            .map_err(|source| TrainError::Evaluate { step, source })?;
        let loss = self.whole_loss(loss)?;
        // Asked to stop meanwhile: the resumed run will measure it.
        let Some(loss) = loss else { return Ok(()) };
        if !loss.per_byte().is_finite() {
            let loss = loss.per_byte();
            self.progress
                .warn(&format!("the validation loss after step {step} is {loss}"));
            return Ok(());
        }
        self.state.validation.record(step, loss.per_byte());
        self.board.scalar(VAL_LOSS, step, loss.per_byte());
        self.progress.validation(loss.per_byte());
        Ok(())
    }

    fn evaluation_is_due(&self) -> bool {
        let step = self.state.step;
        step.is_multiple_of(self.settings.eval.every as u64) || step >= self.settings.steps as u64
    }

    fn checkpoint_is_due(&self) -> bool {
        let step = self.state.step;
        step > 0 && step.is_multiple_of(self.settings.checkpoint.every as u64)
    }

    /// Saves when that is due: at the settings' cadence, at a new best validation loss, before
    /// leaving.
    fn checkpoint(&mut self, leaving: bool) -> Result<(), TrainError> {
        let step = self.state.step;
        let best = self.settings.checkpoint.best
            && step > 0
            && self
                .state
                .validation
                .best
                .is_some_and(|best| best.step == step);
        if self.checkpoint_is_due() || best || leaving {
            self.save()
        } else {
            Ok(self.checkpoints.check()?)
        }
    }

    fn save(&mut self) -> Result<(), TrainError> {
        if self.saved == Some(self.state.step) {
            return Ok(());
        }
        let outcome = self.outcome();
        self.advance_clock();
        let (start, step) = (Instant::now(), self.state.step);
        self.write_checkpoint()?;
        self.saved = Some(step);
        let pause = start.elapsed().as_secs_f64();
        self.longest_pause = Some(self.longest_pause.map_or(pause, |most| most.max(pause)));
        self.board.scalar("checkpoint/pause_seconds", step, pause);
        outcome.map(drop)
    }

    // ------------------------------------------------------------------------------------------
    // The step. `state` moves on only after the optimiser has run or left the update out, or has been
    // launched with a guard against what is not finite, so that an error leaves the state from before
    // the step's rows were read.
    fn step(&mut self) -> Result<(), TrainError> {
        let start = Instant::now();
        let lr = self.schedule.lr(self.state.step);
        let (launched, batch, flops) = match self.parallel {
            None => self.launch(lr)?,
            Some(_) => self.launch_share(lr)?,
        };
        self.state.flops += flops;
        self.count_seconds(start);
        self.unshown += launched.counts.tokens as usize;
        self.state.step += 1;
        self.state.tokens += launched.counts.tokens;
        self.state.data = self.rows.position();
        self.unread.push(Unread {
            step: self.state.step,
            lr,
            launched,
            batch,
        });
        Ok(())
    }

    /// Launches the step of the next rows; also what is kept of these, and its operations.
    fn launch(&mut self, lr: f64) -> Result<Launched, TrainError> {
        let start = Instant::now();
        let (mut micro_batches, mut batch) = (Vec::new(), Vec::new());
        for _ in 0..self.settings.batch.accumulate {
            let (rows, kept) = self.next_rows()?;
            self.meter.packing.add(&rows);
            micro_batches.push(MicroBatch::new(&rows, self.device)?);
            batch.push(kept);
        }
        self.meter.data_seconds += start.elapsed().as_secs_f64();
        let launched = launch_step(
            &mut self.model,
            &mut self.optimizer,
            &micro_batches,
            &self.attention,
            lr,
            self.settings.optim.clip,
        )
        .map_err(|source| TrainError::Step {
            step: self.state.step + 1,
            source,
        })?;
        let mask = self.settings.kernel.mask();
        let flops = self.meter.add(&micro_batches, &self.model.shape, mask);
        Ok((launched, batch, flops))
    }

    /// The rows of a micro-batch, and what is kept of them for reports.
    pub(crate) fn next_rows(&mut self) -> Result<(Vec<Row>, Vec<KeptRow>), DataError> {
        let (mut rows, mut kept) = (Vec::new(), Vec::new());
        while rows.len() < self.settings.batch.rows {
            let Some(row) = self.rows.next() else { break };
            let row = row?;
            if self.watch.wants_rows() {
                kept.push(KeptRow::new(&row, self.rows.position()));
            }
            rows.push(row);
        }
        Ok((rows, kept))
    }

    /// Waits for the steps that were launched, unless that has been done, and says what the last one did.
    fn outcome(&mut self) -> Result<Option<StepReport>, TrainError> {
        let start = Instant::now();
        let (mut last, mut failure) = (None, None);
        for unread in std::mem::take(&mut self.unread) {
            let step = unread.step;
            let read = unread.launched.read();
            let report = read.map_err(|source| TrainError::Step { step, source })?;
            self.take_in(&unread, &report);
            if failure.is_none() && self.watch.stops(&self.state.guard) {
                failure = Some(TrainError::NotFinite {
                    step,
                    in_a_row: self.state.guard.in_a_row,
                    saved: self.state.step,
                });
            }
            last = Some(report);
        }
        self.count_seconds(start);
        match failure {
            Some(failure) => Err(failure),
            None => Ok(last),
        }
    }

    fn take_in(&mut self, unread: &Unread, report: &StepReport) {
        if report.is_finite() {
            self.state.train_loss = Some(report.loss.per_byte());
        }
        let step = ReadStep {
            step: unread.step,
            lr: unread.lr,
            report,
            unit: UNIT,
            batch: &unread.batch,
        };
        if let Some(words) = self.watch.take(&mut self.state.guard, &step) {
            self.progress.warn(&words);
        }
        self.progress.skipped(self.state.guard.skipped);
    }
    // ------------------------------------------------------------------------------------------

    fn count_seconds(&mut self, start: Instant) {
        let seconds = start.elapsed().as_secs_f64();
        self.meter.seconds += seconds;
        self.state.step_seconds += seconds;
    }

    /// Looks at the outcome of steps where somebody wants to know it, and now and then: a GPU is kept
    /// waiting for nothing else. Without a guard on the device the host has it anyway.
    fn log(&mut self) -> Result<(), TrainError> {
        let step = self.state.step;
        let is_point = step.is_multiple_of(self.settings.log.every as u64);
        let is_wanted = is_point || self.evaluation_is_due() || self.checkpoint_is_due();
        let is_high_time = !self.optimizer.is_guarded() || self.unread.len() >= MOST_UNREAD;
        if (is_wanted || is_high_time)
            && let Some(report) = self.outcome()?
        {
            let (lr, tokens) = (
                self.schedule.lr(step - 1),
                std::mem::take(&mut self.unshown),
            );
            let loss = report.loss.per_byte();
            self.progress.step(step as usize, loss, lr, tokens);
            if is_point {
                self.log_point(&report, lr);
            }
        }
        self.tell_board_failure();
        Ok(())
    }

    fn log_point(&mut self, report: &StepReport, lr: f64) {
        let step = self.state.step;
        let meter = std::mem::take(&mut self.meter);
        let mut points = vec![
            ("train/lr", lr),
            ("train/skipped_steps", self.state.guard.skipped as f64),
            (TOKENS, self.state.tokens as f64),
        ];
        if report.is_finite() {
            points.push((TRAIN_LOSS, report.loss.per_byte()));
            points.push(("train/grad_norm", report.grad_norm));
        }
        points.extend(meter.curves(self.peak_tflops));
        for (tag, value) in points {
            self.board.scalar(tag, step, value);
        }
        for (tag, value) in self.attention.take_statistics() {
            self.board.scalar(&tag, step, value);
        }
    }

    fn finish(mut self) -> Result<(), TrainError> {
        self.advance_clock();
        self.tell_board_failure();
        let summary = self.summary();
        summary.write(&self.folder.path().join("summary.json"))?;
        self.plot();
        self.progress.finish();
        println!("{}", summary.table(self.folder.path()));
        Ok(())
    }

    fn summary(&self) -> RunSummary {
        let TrainState {
            step,
            tokens,
            seconds,
            step_seconds,
            flops,
            train_loss,
            seed,
            ..
        } = self.state;
        let per_step_second = |work: f64| (step_seconds > 0.0).then(|| work / step_seconds);
        let model_tflops = per_step_second(flops / 1e12);
        let validation = &self.state.validation;
        RunSummary {
            attention: self.settings.attention,
            ablate: self.settings.kernel.ablate,
            steps: step as usize,
            val_loss_first: validation.first,
            val_loss: validation.last.map(|last| last.loss),
            val_loss_best: validation.best.map(|best| best.loss),
            train_loss,
            skipped_steps: self.state.guard.skipped,
            checkpoint_pause_s: self.longest_pause,
            unit: UNIT.into(),
            tokens,
            tokens_per_s: if seconds > 0.0 {
                tokens as f64 / seconds
            } else {
                0.0
            },
            step_tokens_per_s: per_step_second(tokens as f64),
            model_tflops,
            utilisation: model_tflops
                .zip(self.peak_tflops)
                .map(|(rate, peak)| rate / peak),
            seconds,
            parameters: self.model.params.count() as u64,
            data: self.data_counts.clone(),
            seed,
            settings: self.settings.clone(),
            versions: self.state.versions.clone(),
        }
    }

    /// Draws the loss curves beside the summary. A plot that fails costs no run its result.
    fn plot(&mut self) {
        let curves = self.board.curves([TRAIN_LOSS, VAL_LOSS], self.state.step);
        let drawn = curves
            .map_err(|error| chain(&error))
            .and_then(|[train, val]| {
                let series = [
                    Series {
                        name: "training".into(),
                        points: train,
                        style: Style::Thin,
                    },
                    Series {
                        name: "validation".into(),
                        points: val,
                        style: Style::Bold,
                    },
                ];
                let title = format!("Loss, {} attention", self.settings.attention);
                let y_axis = format!("loss ({UNIT})");
                let path = self.folder.path().join("loss.svg");
                loss_svg(&path, &title, &series, ["step", &y_axis]).map_err(|error| chain(&error))
            });
        if let Err(error) = drawn {
            self.progress.warn(&format!("no loss plot: {error}"));
        }
    }

    fn tell_board_failure(&mut self) {
        if let Some(error) = self.board.take_failure() {
            let error = chain(&error);
            self.progress
                .warn(&format!("{error}. Training goes on without TensorBoard"));
        }
    }

    fn advance_clock(&mut self) {
        self.state.seconds += self.clock.elapsed().as_secs_f64();
        self.clock = Instant::now();
    }
}
