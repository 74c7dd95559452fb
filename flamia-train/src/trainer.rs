//! The training loop, to be read top to bottom: evaluate, checkpoint, step, log.
//!
//! Between two steps the run's whole state is the weights, AdamW's moments and a [`TrainState`];
//! a checkpoint is exactly that. On one device with one number of threads, a run that is stopped
//! and resumed anywhere ends with the same bits as one that never stopped.

use std::collections::BTreeMap;
use std::time::Instant;

use datasets::{PrefetchedRows, Row};
use tch::Device;

use crate::attention::Attention;
use crate::batch::{MicroBatch, Packing};
use crate::board::{Board, TRAIN_LOSS, VAL_LOSS};
use crate::checkpoint::{Checkpoints, TrainState};
use crate::data::DataError;
use crate::error::{TrainError, chain};
use crate::evaluate::evaluate;
use crate::model::Model;
use crate::optim::AdamW;
use crate::plot::{Series, Style, loss_svg};
use crate::run_folder::RunFolder;
use crate::schedule::Schedule;
use crate::settings::Settings;
use crate::step::{StepReport, train_step};
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

/// A run, ready to go on.
pub struct Trainer {
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
    pub(crate) checkpoints: Checkpoints,
    pub(crate) state: TrainState,
    /// The step of the newest checkpoint.
    pub(crate) saved: Option<u64>,
    pub(crate) board: Board,
    pub(crate) progress: Progress,
    /// When `state.seconds` was last brought up to date.
    pub(crate) clock: Instant,
}

/// What one turn of the loop has to tell.
struct Turn {
    report: StepReport,
    lr: f64,
    packing: Packing,
    seconds: f64,
    /// Of `seconds`, waiting for rows and laying them out.
    data_seconds: f64,
}

impl Trainer {
    /// Trains until the last step or until asked to stop, and leaves the run's checkpoint, summary
    /// and plot in its folder.
    ///
    /// # Errors
    /// [`TrainError`]; the last good state is saved first, whenever that is possible.
    pub fn run(mut self) -> Result<Outcome, TrainError> {
        let steps = self.settings.steps as u64;
        let outcome = loop {
            self.evaluate()?;
            // Asked once: a signal after this is the next turn's, which saves before it leaves.
            let stopping = self.stop.asked();
            let done = self.state.step >= steps;
            self.checkpoint(stopping || done)?;
            if stopping {
                break Outcome::Stopped;
            }
            if done {
                break Outcome::Finished;
            }
            match self.step() {
                Ok(turn) => self.log(&turn),
                Err(error) => {
                    self.save()?;
                    return Err(error);
                }
            }
        };
        self.finish()?;
        Ok(outcome)
    }

    /// Measures the validation loss when it is due: before the first step, at the settings'
    /// cadence and after the last step.
    fn evaluate(&mut self) -> Result<(), TrainError> {
        let step = self.state.step;
        let last = self.settings.steps as u64;
        let due = step.is_multiple_of(self.settings.eval.every as u64) || step >= last;
        let known = self
            .state
            .validation
            .last
            .is_some_and(|last| last.step == step);
        if !due || known {
            return Ok(());
        }
        let loss = evaluate(&self.model, &self.validation, &self.attention, &self.stop)
            .map_err(|source| TrainError::Evaluate { step, source })?;
        // Asked to stop meanwhile: the resumed run will measure it.
        let Some(loss) = loss else { return Ok(()) };
        self.state.validation.record(step, loss.per_byte());
        self.board.scalar(VAL_LOSS, step, loss.per_byte());
        self.progress.validation(loss.per_byte());
        Ok(())
    }

    /// Saves when that is due: at the settings' cadence, at a new best validation loss, before
    /// leaving.
    fn checkpoint(&mut self, leaving: bool) -> Result<(), TrainError> {
        let step = self.state.step;
        let cadence = step > 0 && step.is_multiple_of(self.settings.checkpoint.every as u64);
        let best = step > 0
            && self
                .state
                .validation
                .best
                .is_some_and(|best| best.step == step);
        if cadence || best || leaving {
            self.save()
        } else {
            Ok(())
        }
    }

    fn save(&mut self) -> Result<(), TrainError> {
        if self.saved == Some(self.state.step) {
            return Ok(());
        }
        self.advance_clock();
        self.checkpoints
            .save(&self.state, &self.model.params, &self.optimizer)?;
        self.saved = Some(self.state.step);
        Ok(())
    }

    // ------------------------------------------------------------------------------------------
    // The step. `state` moves on only after the optimiser has run, so that an error leaves the
    // state from before the step's rows were read.
    fn step(&mut self) -> Result<Turn, TrainError> {
        let start = Instant::now();
        let batch = &self.settings.batch;
        let mut packing = Packing::default();
        let micro_batches = (0..batch.accumulate)
            .map(|_| {
                let rows: Result<Vec<Row>, _> = self.rows.by_ref().take(batch.rows).collect();
                let rows = rows.map_err(DataError::from)?;
                packing.add(&rows);
                Ok(MicroBatch::new(&rows, self.device)?)
            })
            .collect::<Result<Vec<_>, TrainError>>()?;
        let data_seconds = start.elapsed().as_secs_f64();
        let lr = self.schedule.lr(self.state.step);
        let report = train_step(
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
        self.state.step += 1;
        self.state.tokens += report.loss.tokens;
        self.state.train_loss = Some(report.loss.per_byte());
        self.state.data = self.rows.position();
        Ok(Turn {
            report,
            lr,
            packing,
            data_seconds,
            seconds: start.elapsed().as_secs_f64(),
        })
    }
    // ------------------------------------------------------------------------------------------

    fn log(&mut self, turn: &Turn) {
        let step = self.state.step;
        let loss = turn.report.loss;
        self.progress.step(
            step as usize,
            loss.per_byte(),
            turn.lr,
            loss.tokens as usize,
        );
        if step.is_multiple_of(self.settings.log.every as u64) {
            for (tag, value) in [
                (TRAIN_LOSS, loss.per_byte()),
                ("train/lr", turn.lr),
                ("train/grad_norm", turn.report.grad_norm),
                ("train/tokens_per_s", loss.tokens as f64 / turn.seconds),
                ("data/seconds_per_step", turn.data_seconds),
                ("data/documents_per_row", turn.packing.documents_per_row()),
                ("data/padding_share", turn.packing.padding_share()),
                ("data/longest_document", turn.packing.longest as f64),
            ] {
                self.board.scalar(tag, step, value);
            }
            for (tag, value) in self.attention.take_statistics() {
                self.board.scalar(&tag, step, value);
            }
        }
        self.tell_board_failure();
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
            train_loss,
            seed,
            ..
        } = self.state;
        let validation = &self.state.validation;
        RunSummary {
            attention: self.settings.attention,
            ablate: self.settings.kernel.ablate,
            steps: step as usize,
            val_loss_first: validation.first,
            val_loss: validation.last.map(|last| last.loss),
            val_loss_best: validation.best.map(|best| best.loss),
            train_loss,
            unit: UNIT.into(),
            tokens,
            tokens_per_s: if seconds > 0.0 {
                tokens as f64 / seconds
            } else {
                0.0
            },
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
