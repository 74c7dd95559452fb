//! `probe consistency`: training with the forward and backward passes at odds.

use std::ffi::OsString;
use std::path::PathBuf;

use datasets::Position;
use flamia_kernels::{Ablation, Options};
use flamia_train::attention::Attention;
use flamia_train::batch::MicroBatch;
use flamia_train::capture::{Activations, CaptureError, Layer};
use flamia_train::data::{DataError, validation_batches};
use flamia_train::error::TrainError;
use flamia_train::evaluate::evaluate;
use flamia_train::parts::{Parts, schedule};
use flamia_train::plot::{Series, Style, loss_svg};
use flamia_train::settings::{self, Ablate, Settings};
use flamia_train::step::{StepError, train_step};
use flamia_train::stop::Stop;
use flamia_train::trainer::UNIT;
use serde::Serialize;

use crate::attention::{attend, exact};
use crate::error::ProbeError;
use crate::metric::cosine;
use crate::problem::Problem;
use crate::progress::Progress;

use super::read;

/// Train with the forward and backward passes at odds
///
/// Trains the same model from the same seed once with matched numerics and once with each defect,
/// and sets the single-step cosines beside the losses and the gradient's norm. Look for a run whose
/// cosines stay near those of the matched run while its loss falls behind or its norm grows: a
/// single step does not show whether training is stable (paper, sections 3.3 and 4.5).
///
/// The cosines compare the attention's results with exact attention in float64 on what the run's own
/// layers get from a batch of validation documents; the worst layer counts. What follows `--` goes to
/// the trainer: `-- --attention fp4 --optim-lr 4e-3`.
#[derive(Clone, Debug, clap::Args)]
pub struct Consistency {
    /// Defects, a run each: tiling, unquantised-d, output-d, p4-forward, exp-forward,
    /// floor-exponents, per-tensor, grouped-v, unclamped-polynomial, saturate
    #[arg(
        long,
        value_name = "DEFECTS",
        value_delimiter = ',',
        default_value = "p4-forward"
    )]
    pub ablate: Vec<Ablation>,

    /// Optimiser steps of every run
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub steps: usize,

    /// Steps between rows
    #[arg(long, value_name = "N", default_value_t = 25)]
    pub every: usize,

    /// Seed of the weights, the data's order and the rounding
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Draw the loss curves of all runs
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Flags of `cargo xtask train`
    #[arg(last = true, value_name = "TRAIN FLAGS")]
    pub train: Vec<OsString>,
}

/// One measurement of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The run's attention.
    pub path: String,
    /// The defect; none for matched numerics.
    pub ablate: Option<String>,
    /// Optimiser steps done.
    pub step: usize,
    /// Whether this step gave a loss or a gradient that is no number. It is then the run's last row,
    /// and has no validation loss and no cosines.
    pub diverged: bool,
    /// Mean training loss of the steps since the last row.
    pub loss: Option<f64>,
    /// Validation loss.
    pub val_loss: Option<f64>,
    /// Largest norm of the gradient, before clipping, since the last row.
    pub grad_norm: Option<f64>,
    /// Cosine of O with exact attention, of the worst layer.
    pub o: Option<f64>,
    /// Cosine of dQ.
    pub dq: Option<f64>,
    /// Cosine of dK.
    pub dk: Option<f64>,
    /// Cosine of dV.
    pub dv: Option<f64>,
}

/// One run: its rows, and its curves for the plot.
struct Run {
    name: String,
    rows: Vec<Row>,
    training: Vec<(f64, f64)>,
}

impl Consistency {
    /// Trains every run and measures it before the first step, every so many steps and after the
    /// last one. Draws the plot if asked to.
    ///
    /// # Errors
    /// Settings that are refused or do not go with a defect, before anything is trained; data that
    /// cannot be had; a plot that cannot be written. A run that diverges is a result.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        if self.every == 0 {
            return Err(ProbeError::Setting {
                setting: "every",
                found: "0".into(),
                expected: "rows come every 1 or more steps".into(),
            });
        }
        let plain = self.settings()?;
        let mut runs = vec![(plain.clone(), "matched".to_string())];
        for &ablation in &self.ablate {
            let mut settings = plain.clone();
            settings.kernel.ablate = Ablate(Some(ablation));
            settings.validate().map_err(TrainError::from)?;
            runs.push((settings, ablation.to_string()));
        }
        let parts = Parts::new(&plain)?;
        let progress = Progress::new(runs.len() * self.steps);
        let runs = runs
            .into_iter()
            .map(|(settings, name)| self.train(&parts, &settings, name, &progress))
            .collect::<Result<Vec<_>, _>>()?;
        drop(progress);
        if let Some(path) = &self.svg {
            let title = format!("Loss, {} attention", plain.attention);
            let axes = ["step", &format!("loss ({UNIT})")];
            loss_svg(
                path,
                &title,
                &runs.iter().flat_map(curves).collect::<Vec<_>>(),
                axes,
            )?;
        }
        Ok(runs.into_iter().flat_map(|run| run.rows).collect())
    }

    /// What the table shows.
    pub fn caption(&self) -> String {
        format!(
            "training of one model from seed {}, matched and with each defect; losses in {UNIT}, \
             cosines with exact attention on the run's own activations",
            self.seed
        )
    }

    /// The settings of the matched run.
    fn settings(&self) -> Result<Settings, ProbeError> {
        let own = [
            ("--steps", self.steps.to_string()),
            ("--seed", self.seed.to_string()),
        ];
        let own = own
            .into_iter()
            .flat_map(|(flag, value)| [flag.into(), value.into()]);
        let args = self.train.iter().cloned().chain(own);
        let mut settings = Settings::load(args).map_err(TrainError::from)?;
        settings.kernel.ablate = Ablate(None);
        match settings.attention {
            settings::Attention::Path(path) if path.is_low_bit() => Ok(settings),
            other => Err(ProbeError::Setting {
                setting: "attention",
                found: other.to_string(),
                expected: "only low-bit paths have passes that can be at odds".into(),
            }),
        }
    }

    fn train(
        &self,
        parts: &Parts,
        settings: &Settings,
        name: String,
        progress: &Progress,
    ) -> Result<Run, ProbeError> {
        if let Some(ablation) = settings.kernel.ablate.0 {
            eprintln!("warning: {}", ablation.warning());
        }
        let (mut model, mut optimizer) = parts.model(settings)?;
        let attention = Attention::new(settings);
        let lr = schedule(settings);
        let validation = validation_batches(&parts.dataset, settings, parts.device)?;
        let sample = validation.first().ok_or(CaptureError::NoRows)?;
        let mut data = parts
            .dataset
            .stream_from(Position::default())
            .map_err(|error| TrainError::from(DataError::from(error)))?;
        let mut run = Run {
            name,
            rows: Vec::new(),
            training: Vec::new(),
        };
        let mut since = Since::default();
        for step in 0..=self.steps {
            progress.at(format_args!("{}, step {step}", run.name));
            if step % self.every == 0 || step == self.steps {
                let loss = evaluate(&model, &validation, &attention, &Stop::default()).map_err(
                    |source| TrainError::Evaluate {
                        step: step as u64,
                        source,
                    },
                )?;
                let here = attention.at(step as u64, 0);
                let activations =
                    Activations::of(&model, sample, &here).map_err(CaptureError::from)?;
                let mut row = since.row(settings, step);
                row.val_loss = loss
                    .map(|loss| loss.per_byte())
                    .filter(|loss| loss.is_finite());
                [row.o, row.dq, row.dk, row.dv] = cosines(&activations, settings)?;
                run.rows.push(row);
                since = Since::default();
            }
            if step == self.steps {
                break;
            }
            let batches = (0..settings.batch.accumulate)
                .map(|_| {
                    let rows: Result<Vec<_>, _> = data.by_ref().take(settings.batch.rows).collect();
                    let rows = rows.map_err(DataError::from)?;
                    Ok(MicroBatch::new(&rows, parts.device)?)
                })
                .collect::<Result<Vec<_>, TrainError>>()?;
            let report = train_step(
                &mut model,
                &mut optimizer,
                &batches,
                &attention,
                lr.lr(step as u64),
                settings.optim.clip,
            );
            match report {
                Ok(report) => {
                    run.training
                        .push((step as f64 + 1.0, report.loss.per_byte()));
                    since.add(report.loss.per_byte(), report.grad_norm);
                }
                // A result, and the run's last one.
                Err(StepError::LossNotFinite { .. } | StepError::NormNotFinite { .. }) => {
                    run.rows.push(since.diverged(settings, step + 1));
                    break;
                }
                Err(source) => {
                    return Err(TrainError::Step {
                        step: step as u64 + 1,
                        source,
                    }
                    .into());
                }
            }
            progress.step();
        }
        Ok(run)
    }
}

/// What training told since the last row.
#[derive(Default)]
struct Since {
    losses: Vec<f64>,
    grad_norm: Option<f64>,
}

impl Since {
    fn add(&mut self, loss: f64, grad_norm: f64) {
        self.losses.push(loss);
        self.grad_norm = Some(self.grad_norm.map_or(grad_norm, |most| most.max(grad_norm)));
    }

    fn row(&self, settings: &Settings, step: usize) -> Row {
        let count = self.losses.len();
        Row {
            path: settings.attention.to_string(),
            ablate: settings
                .kernel
                .ablate
                .0
                .map(|ablation| ablation.to_string()),
            step,
            diverged: false,
            loss: (count > 0).then(|| self.losses.iter().sum::<f64>() / count as f64),
            val_loss: None,
            grad_norm: self.grad_norm,
            o: None,
            dq: None,
            dk: None,
            dv: None,
        }
    }

    /// The row of a run whose `step`th step gave no number.
    fn diverged(&self, settings: &Settings, step: usize) -> Row {
        Row {
            diverged: true,
            ..self.row(settings, step)
        }
    }
}

/// Cosines of O, dQ, dK and dV with exact attention, each of the layer where it is lowest.
fn cosines(activations: &Activations, settings: &Settings) -> Result<[Option<f64>; 4], ProbeError> {
    let settings::Attention::Path(path) = settings.attention else {
        return Ok([None; 4]);
    };
    let options = Options {
        seed: settings.seed,
        ..settings.kernel.options(path)
    };
    let mut worst = [None; 4];
    for layer in &activations.layers {
        let problem = problem(layer, activations)?;
        let (found, exact) = (attend(&problem, &options)?, exact(&problem, options.mask)?);
        let layer = [
            cosine(&found.o, &exact.o),
            cosine(&found.dq, &exact.dq),
            cosine(&found.dk, &exact.dk),
            cosine(&found.dv, &exact.dv),
        ];
        for (worst, here) in worst.iter_mut().zip(layer) {
            *worst = Some(worst.map_or(here, |worst: f64| worst.min(here)));
        }
    }
    Ok(worst)
}

fn problem(layer: &Layer, activations: &Activations) -> Result<Problem, ProbeError> {
    let (q, k) = (layer.q.size(), layer.k.size());
    Ok(Problem {
        documents: activations.documents.clone(),
        heads: q[1] as usize,
        kv_heads: k[1] as usize,
        head_dim: q[2] as usize,
        q: read(&layer.q)?,
        k: read(&layer.k)?,
        v: read(&layer.v)?,
        d_o: read(&layer.d_o)?,
    })
}

fn curves(run: &Run) -> [Series; 2] {
    let validation = run.rows.iter();
    [
        Series {
            name: format!("{}, training", run.name),
            points: run.training.clone(),
            style: Style::Thin,
        },
        Series {
            name: format!("{}, validation", run.name),
            points: validation
                .filter_map(|row| Some((row.step as f64, row.val_loss?)))
                .collect(),
            style: Style::Bold,
        },
    ]
}
