//! What settings describe, before anything of a run's folder is looked at: device, data, model.

use datasets::Dataset;
use tch::Device;

use crate::data;
use crate::device;
use crate::distributed::World;
use crate::error::TrainError;
use crate::model::{Model, ModelShape, Params, Precision};
use crate::optim::{AdamW, AdamWConfig};
use crate::schedule::Schedule;
use crate::settings::{self, Settings};

/// Where a run computes and what it learns from.
pub struct Parts {
    /// Where tensors live.
    pub device: Device,
    /// The device in words, and why that one.
    pub device_words: String,
    /// CPU threads, of torch and of the attention.
    pub threads: usize,
    /// The data, opened.
    pub dataset: Dataset,
    /// A line about the built-in corpus, if that is the data.
    pub corpus: Option<String>,
}

impl Parts {
    /// Takes threads and device and opens the data.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn new(settings: &Settings) -> Result<Self, TrainError> {
        Self::of_rank(settings, None)
    }

    /// The parts of one of several ranks, which share the machine's cores and take a GPU each.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn of_rank(settings: &Settings, world: Option<&World>) -> Result<Self, TrainError> {
        let ranks = world.map_or(1, |world| world.local_world);
        let threads = match settings.threads {
            0 => (cores() / ranks).max(1),
            asked => asked,
        };
        let threads = set_threads(threads)?;
        let (device, device_words) = match world {
            None => device::choose(settings.device)?,
            Some(world) => device::choose_of_rank(settings.device, world.local_rank)?,
        };
        let (dataset, corpus) = data::open(settings)?;
        Ok(Self {
            device,
            device_words,
            threads,
            dataset,
            corpus,
        })
    }

    /// The model of `settings` as it begins, and its optimiser.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn model(&self, settings: &Settings) -> Result<(Model, AdamW), TrainError> {
        let vocab = self.dataset.tokenizer().vocab_size();
        let model = build_model(settings, vocab, self.device)?;
        let optimizer = AdamW::new(adamw(settings), &model.params)?;
        Ok((model, optimizer))
    }
}

/// The learning rates of `settings`.
pub fn schedule(settings: &Settings) -> Schedule {
    Schedule {
        peak: settings.optim.lr,
        warmup: settings.optim.warmup as u64,
        steps: settings.steps as u64,
        min_ratio: settings.optim.min_lr_ratio,
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Gives torch and the attention their threads; 0 means all cores.
pub(crate) fn set_threads(asked: usize) -> Result<usize, TrainError> {
    let threads = match asked {
        0 => cores(),
        asked => asked,
    };
    tch::set_num_threads(threads as i32);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global();
    let running = rayon::current_num_threads();
    if pool.is_err() && running != threads {
        return Err(TrainError::Threads {
            asked: threads,
            running,
        });
    }
    Ok(threads)
}

fn build_model(settings: &Settings, vocab: usize, device: Device) -> Result<Model, TrainError> {
    let shape = sound_shape(settings, vocab)?;
    let specs = shape.parameters(settings.model.init_std);
    let params = Params::init(&specs, settings.seed, device)?;
    Ok(assembled(settings, shape, params, device))
}

/// The model of `settings` before its weights are loaded, all zeros.
///
/// # Errors
/// [`TrainError`] for a shape that cannot be or does not fit in memory.
pub(crate) fn empty_model(
    settings: &Settings,
    vocab: usize,
    device: Device,
) -> Result<Model, TrainError> {
    let shape = sound_shape(settings, vocab)?;
    let params = Params::zeros(&shape.parameters(settings.model.init_std), device)?;
    Ok(assembled(settings, shape, params, device))
}

/// The shape of the model of `settings` with `vocab` token ids.
pub(crate) fn shape(settings: &Settings, vocab: usize) -> ModelShape {
    let model = &settings.model;
    ModelShape {
        vocab,
        dim: model.dim,
        layers: model.layers,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        ffn_dim: model.ffn_dim,
        rope_theta: model.rope_theta,
        norm_eps: model.norm_eps,
        tied: model.tied,
    }
}

fn sound_shape(settings: &Settings, vocab: usize) -> Result<ModelShape, TrainError> {
    let shape = shape(settings, vocab);
    shape.check()?;
    Ok(shape)
}

fn assembled(settings: &Settings, shape: ModelShape, params: Params, device: Device) -> Model {
    let mut model = Model::new(shape, params);
    model.precision = match (settings.compute.precision, device) {
        (settings::Precision::Fp32, _) | (settings::Precision::Auto, Device::Cpu) => {
            Precision::Fp32
        }
        (settings::Precision::Bf16 | settings::Precision::Auto, _) => Precision::Bf16,
    };
    model.loss_chunk = settings.compute.loss_chunk;
    model
}

fn adamw(settings: &Settings) -> AdamWConfig {
    let optim = &settings.optim;
    AdamWConfig {
        beta1: optim.beta1,
        beta2: optim.beta2,
        eps: optim.eps,
        weight_decay: optim.weight_decay,
    }
}
