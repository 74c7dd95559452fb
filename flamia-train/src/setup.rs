//! From settings to a run that is ready to go on, new or resumed.

use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

use datasets::{Dataset, Position};
use flamia_autograd::prepare_gpu;
use flamia_kernels::Backend;
use tch::Device;
use toml::Table;

use crate::atomic::atomic_write;
use crate::attention::Attention;
use crate::board::Board;
use crate::checkpoint::{Checkpoints, Saver, TrainState, Validation};
use crate::data::{self, DataError};
use crate::device;
use crate::distributed::{DataParallel, Team, TeamError, Verdict, World, is_operation};
use crate::error::{TrainError, chain};
use crate::guard::{GuardState, Watch};
use crate::machine::bf16_tflops;
use crate::meter::Meter;
use crate::model::{Model, Precision};
use crate::optim::AdamW;
use crate::parts::{Parts, schedule};
use crate::resume;
use crate::run_folder::{RUNS, RunFolder, RunFolderError};
use crate::settings::{self, Settings, Start};
use crate::stop::{Stop, leave};
use crate::summary::Versions;
use crate::terminal::Progress;
use crate::trainer::Trainer;

impl Trainer {
    /// Sets up the run that the command line `args` (without the program's name) and the
    /// environment describe: a new one, or with `--resume` the one in `--out` or the newest. As one of
    /// several ranks, if the environment says so; then the process ends with code 1 when another rank does.
    ///
    /// # Errors
    /// [`TrainError`]; nothing of an earlier run has changed then.
    pub fn from_args(args: &[OsString], stop: Stop) -> Result<Self, TrainError> {
        let world = World::from_environment().map_err(TeamError::from)?;
        let Some(world) = world else {
            return Self::of_rank(args, stop, None);
        };
        let settings = Settings::distributed(args.iter().cloned(), std::env::vars_os())?;
        let team = Team::join(world, &settings, end_with)?;
        match Self::of_rank(args, stop, Some(&team)) {
            Ok(trainer) => Ok(Self {
                team: Some(team),
                ..trainer
            }),
            Err(error) => {
                team.fail(&chain(&error), is_operation(&error));
                Err(error)
            }
        }
    }

    fn of_rank(args: &[OsString], stop: Stop, team: Option<&Team>) -> Result<Self, TrainError> {
        let args = || args.iter().cloned();
        let start = Settings::start(args(), std::env::vars_os())?;
        let open = || match &start {
            Start::Resume { out } => {
                let path = match out {
                    Some(path) => path.clone(),
                    None => RunFolder::newest(Path::new(RUNS))?,
                };
                Ok::<_, TrainError>(RunFolder::open(&path)?)
            }
            Start::New => {
                let settings = Settings::load(args())?;
                let path = settings.out.clone().unwrap_or_else(|| {
                    RunFolder::named(chrono::Utc::now(), &settings.attention.to_string())
                });
                Ok(RunFolder::create(&path)?)
            }
        };
        let folder = match team {
            None => open()?,
            Some(team) => {
                let mut opened = None;
                let path = team.decided("run's folder", || {
                    let folder = opened.insert(open()?);
                    Ok::<_, TrainError>(folder.path().to_string_lossy().into_owned())
                })?;
                opened.unwrap_or_else(|| RunFolder::follow(Path::new(&path)))
            }
        };
        let mut settings = match &start {
            Start::Resume { .. } => {
                Settings::load_resuming(&folder.settings(), args(), std::env::vars_os())?
            }
            Start::New => Settings::load(args())?,
        };
        settings.out = Some(folder.path().into());
        if team.is_some() {
            // What the ranks have met with.
            settings.distributed = Settings::distributed(args(), std::env::vars_os())?;
        }
        if leads(team) {
            eprint!("{}", settings.describe());
        }
        Self::prepared(settings, folder, stop, team)
    }

    /// Sets up the run that `settings` describe in `folder`, which [`RunFolder::create`] or, with
    /// `settings.resume`, [`RunFolder::open`] gave, for this process alone.
    ///
    /// A resumed run goes on from its newest whole checkpoint, or from the start if it was killed
    /// before the first.
    ///
    /// # Errors
    /// [`TrainError`]; nothing of an earlier run has changed then.
    pub fn new(settings: Settings, folder: RunFolder, stop: Stop) -> Result<Self, TrainError> {
        Self::prepared(settings, folder, stop, None)
    }

    fn prepared(
        settings: Settings,
        folder: RunFolder,
        stop: Stop,
        team: Option<&Team>,
    ) -> Result<Self, TrainError> {
        let table = saved_form(&settings)?;
        if settings.resume {
            refuse_changes(&folder.settings(), &table)?;
        }
        let world = team.map(Team::world);
        if let Some(team) = team {
            team.same("settings", &common(&settings)?)?;
        }
        let parts = parts_in_turn(&settings, team)?;
        let (mut model, mut optimizer) = parts.model(&settings)?;
        let Parts {
            device,
            device_words,
            threads,
            dataset,
            corpus,
        } = parts;
        let mut notes = vec![format!("device: {device_words}")];
        notes.extend(attention_on(device, &settings)?);
        notes.extend(corpus);
        notes.push(dataset.report().to_string());
        notes.push(format!("model: {} parameters", model.params.count()));
        if model.precision == Precision::Bf16 {
            notes.push(
                "precision: products in BF16, weights and the residual stream in FP32".into(),
            );
        }

        if let Some(world) = world {
            notes.push(format!(
                "ranks: {}, which share every global batch; this is rank {}",
                world.member.world, world.member.rank
            ));
        }

        let checkpoints = match leads(team) {
            true => Checkpoints::open(folder.path(), settings.checkpoint.keep)?,
            false => Checkpoints::look(folder.path()),
        };
        let saved = match settings.resume {
            true => take_up_newest(&checkpoints, &model, &mut optimizer, team, &mut notes)?,
            false if !leads(team) || checkpoints.is_empty()? => None,
            false => {
                return Err(RunFolderError::Occupied {
                    path: folder.path().into(),
                }
                .into());
            }
        };
        let saved_step = saved.as_ref().map(|state| state.step);
        let peak_tflops = match settings.compute.peak_tflops {
            0.0 => bf16_tflops(&device::name(device)),
            stated => Some(stated),
        };
        let ranks = world.map_or(1, |world| world.member.world);
        let peak_tflops = peak_tflops.map(|peak| ranks as f64 * peak);
        let fresh = fresh_state(&settings, &table, &dataset, device, threads);
        let mut state = match saved {
            Some(saved) => continued(saved, fresh, settings.steps as u64, &folder)?,
            None => fresh,
        };
        let mut guard = settings.guard.clone();
        if !leads(team) {
            // Rank 0 reports for all.
            guard.spike_reports = 0;
        }
        let watch = Watch::new(guard, folder.path(), dataset.clone());
        if watch.stops(&state.guard) {
            // It was stopped for that; going on, it has as many again.
            state.guard.in_a_row = 0;
        }
        // One thread makes rows while the step computes; few of them, since a row is made in
        // microseconds.
        let rows = dataset
            .stream_from(state.data)
            .and_then(|rows| rows.prefetch(1, 2 * settings.batch.rows))
            .map_err(DataError::from)?;
        let mut validation = data::validation_batches(&dataset, &settings, device)?;
        let mut checkpoints = Saver::new(checkpoints);
        if leads(team) {
            checkpoints.reserve(&model.params, &optimizer)?;
        }
        let mut parallel = None;
        if let Some(team) = team {
            let member = team.member();
            validation = validation
                .into_iter()
                .skip(member.rank)
                .step_by(member.world)
                .collect();
            let bucket = settings.distributed.bucket_mib.saturating_mul(1 << 20);
            parallel = Some(DataParallel::new(
                team, &mut model, &optimizer, device, bucket,
            )?);
            // This rank's shard of it is in there.
            optimizer = optimizer.with_moments([]);
            // Before the settings that others may be reading are written again.
            team.meet()?;
        }

        // Only now: everything that can be refused has been.
        let text = table.to_string();
        if leads(team) {
            atomic_write(&folder.settings(), text.as_bytes())?;
        }
        let resume_at = settings
            .resume
            .then(|| saved_step.map_or(0, |step| step + 1));
        let mut board = match leads(team) {
            true => Board::open(folder.path(), resume_at),
            false => Board::closed(folder.path()),
        };
        board.text("settings", state.step, &format!("```toml\n{text}```"));
        let (done, steps) = (state.step as usize, settings.steps);
        let mut progress = match leads(team) {
            true => Progress::new(done, steps),
            false => Progress::silent(done, steps),
        };
        if let Some(ablation) = settings.kernel.ablate.0 {
            progress.warn(&ablation.warning());
        }
        notes.iter().for_each(|note| progress.note(note));
        progress.skipped(state.guard.skipped);

        Ok(Self {
            schedule: schedule(&settings),
            attention: Attention::new(&settings),
            data_counts: data::counts(dataset.report()),
            settings,
            folder,
            stop,
            device,
            model,
            optimizer,
            rows,
            validation,
            checkpoints,
            state,
            saved: saved_step,
            board,
            progress,
            clock: Instant::now(),
            watch,
            unread: Vec::new(),
            meter: Meter::default(),
            unshown: 0,
            longest_pause: None,
            peak_tflops,
            team: None,
            parallel,
        })
    }
}

/// Whether this rank writes and talks: the only one, or rank 0.
fn leads(team: Option<&Team>) -> bool {
    team.is_none_or(Team::leads)
}

/// The settings in which ranks may not differ: all but where things are on their machines.
fn common(settings: &Settings) -> Result<String, TrainError> {
    let here = Settings::default();
    let common = Settings {
        data: here.data,
        tokenizer: here.tokenizer,
        out: here.out,
        device: here.device,
        threads: here.threads,
        ..settings.clone()
    };
    Ok(common.to_toml()?)
}

/// Opens device and data: rank 0 first, which prepares what others find then.
fn parts_in_turn(settings: &Settings, team: Option<&Team>) -> Result<Parts, TrainError> {
    let Some(team) = team else {
        return Parts::new(settings);
    };
    let world = Some(team.world());
    let mut opened = None;
    team.doing("opening the data");
    let identity = |parts: &Parts| format!("{:?}", parts.dataset.identity());
    let leaders = team.decided("data's identity", || {
        Ok::<_, TrainError>(identity(opened.insert(Parts::of_rank(settings, world)?)))
    })?;
    let parts = match opened {
        Some(parts) => parts,
        None => Parts::of_rank(settings, world)?,
    };
    match identity(&parts) == leaders {
        true => Ok(parts),
        false => Err(TeamError::Other {
            rank: team.member().rank,
            what: "data",
        }
        .into()),
    }
}

/// Ends this process for another rank's sake, as it stands: what is on disk is whole at any moment, and the
/// thread that trains may wait for that rank forever.
fn end_with(verdict: &Verdict) {
    eprintln!("error: {verdict}");
    leave(1);
}

/// The state of the run that `settings`, in their saved form `table`, begin: before its first step.
pub(crate) fn fresh_state(
    settings: &Settings,
    table: &Table,
    dataset: &Dataset,
    device: Device,
    threads: usize,
) -> TrainState {
    TrainState {
        step: 0,
        tokens: 0,
        data: Position::default(),
        data_identity: dataset.identity().clone(),
        seed: settings.seed,
        validation: Validation::default(),
        train_loss: None,
        seconds: 0.0,
        step_seconds: 0.0,
        flops: 0.0,
        guard: GuardState::default(),
        settings_sha256: resume::fingerprint(table),
        versions: Versions::of_this_build(
            flamia_autograd::torch_version().into(),
            device::name(device),
            threads,
        ),
    }
}

/// Loads the newest whole checkpoint, if there is any, and notes which one and what it passed over.
fn take_up_newest(
    checkpoints: &Checkpoints,
    model: &Model,
    optimizer: &mut AdamW,
    team: Option<&Team>,
    notes: &mut Vec<String>,
) -> Result<Option<TrainState>, TrainError> {
    let mut find = || {
        let newest = checkpoints.newest()?;
        for skipped in &newest.skipped {
            notes.push(format!(
                "skipped {}: {}",
                skipped.path.display(),
                skipped.reason
            ));
        }
        Ok::<_, TrainError>(newest.whole)
    };
    let whole = match team {
        None => find()?,
        Some(team) => {
            let path = team.decided("checkpoint", || {
                let path = find()?.unwrap_or_default();
                Ok::<_, TrainError>(path.to_string_lossy().into_owned())
            })?;
            (!path.is_empty()).then(|| path.into())
        }
    };
    let Some(path) = whole else {
        notes.push("the run has no checkpoint yet: it starts from its first step".into());
        return Ok(None);
    };
    let saved = Checkpoints::load(&path, &model.params, optimizer)?;
    notes.push(format!(
        "resumed from {}, after step {}",
        path.display(),
        saved.step
    ));
    Ok(Some(saved))
}

/// The state of a run that goes on from `saved`, if that is the run that `fresh` would start.
fn continued(
    saved: TrainState,
    fresh: TrainState,
    steps: u64,
    folder: &RunFolder,
) -> Result<TrainState, TrainError> {
    if saved.settings_sha256 != fresh.settings_sha256 {
        return Err(TrainError::SettingsEdited {
            path: folder.settings(),
        });
    }
    if saved.step > steps {
        return Err(TrainError::FewerSteps {
            done: saved.step,
            asked: steps,
        });
    }
    fresh
        .data_identity
        .check(&saved.data_identity)
        .map_err(DataError::from)?;
    Ok(TrainState {
        versions: fresh.versions,
        ..saved
    })
}

/// Refuses what the GPU has no kernel for, and says where attention is computed if not where the model
/// is.
pub(crate) fn attention_on(
    device: Device,
    settings: &Settings,
) -> Result<Option<String>, TrainError> {
    let path = match settings.attention {
        settings::Attention::Path(path) => path,
        settings::Attention::Sdpa => return Ok(None),
        settings::Attention::Flash if device == Device::Cpu => return Err(TrainError::FlashOnCpu),
        settings::Attention::Flash => return Ok(None),
    };
    if device == Device::Cpu {
        return Ok(None);
    }
    let options = settings.kernel.options(path);
    if path == flamia_kernels::Path::Reference || options.backend == Backend::Host {
        return Ok(Some(format!(
            "attention: {path} is computed on the host, which is slow; --attention flash stays on the GPU"
        )));
    }
    let model = &settings.model;
    prepare_gpu(
        device,
        &options,
        model.heads,
        model.kv_heads,
        model.head_dim,
    )
    .map_err(Box::new)?;
    Ok(Some(format!(
        "attention: {path} on the GPU, forward and backward"
    )))
}

fn refuse_changes(saved: &Path, now: &Table) -> Result<(), TrainError> {
    let text = std::fs::read_to_string(saved).map_err(|source| TrainError::SavedSettings {
        path: saved.into(),
        source: source.into(),
    })?;
    let changes = resume::changes(&parse(&text, saved)?, now);
    if changes.is_empty() {
        Ok(())
    } else {
        Err(TrainError::Changed { changes })
    }
}

/// The settings as the run's folder keeps them: `resume` tells how a process was started, not what
/// the run is.
pub(crate) fn saved_form(settings: &Settings) -> Result<Table, TrainError> {
    let settings = Settings {
        resume: false,
        ..settings.clone()
    };
    parse(&settings.to_toml()?, Path::new("settings"))
}

fn parse(text: &str, path: &Path) -> Result<Table, TrainError> {
    text.parse()
        .map_err(|source: toml::de::Error| TrainError::SavedSettings {
            path: path.into(),
            source: source.into(),
        })
}
