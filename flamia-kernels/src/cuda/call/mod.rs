//! Whole calls on a GPU: the schedule of a packed row, the forward pass from BF16 to BF16, and the backward
//! pass from what it saved.

mod form;
mod forward;
mod operand;
mod sections;
mod training;
mod tuning;

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};

use flamia_cuda::{Arch, BuildError, Gpu, Stream};
use flamia_sched::Documents;
use flamia_sched::cuda::{Boundary, BuildCall, ScheduleError, ScheduleKernels, ScheduleLayout};

pub use self::form::{FormChoice, ONE_KERNEL_ROWS, ONE_KERNEL_ROWS_FP32, form_of};
use self::forward::item_rows;
pub use self::forward::{CallTensors, Codes, ForwardPlan};
pub use self::training::{BackwardCodes, BackwardTensors, SavedImages, TrainingPlan};
pub use self::tuning::{Sections, Tuning};
use super::backward_fused::{BackwardFused, BackwardFusedConfig, BackwardFusedError};
use super::backward_keys::{BackwardKeys, BackwardKeysConfig, BackwardKeysError};
use super::backward_queries::{BackwardQueries, BackwardQueriesConfig, BackwardQueriesError};
use super::forward::{Forward, ForwardConfig, ForwardError};
use super::layout::{HeadDim, LayoutError};
use super::quantise::{Forms, Quantisation, QuantiseError, Quantiser};
use super::retile::{RetileError, Retiler, Retiling};
use super::tensor::ScratchError;
use crate::error::AttentionError;
use crate::options::{Options, Path, Profile};

/// A call that was not made.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// What the reference computes and this GPU does not.
    #[error(
        "{what} is not computed on the {gpu} ({arch}): its kernels are of `mxfp8` with profile \
         `hopper` at head dimension 64 or 128, on Hopper (sm_90a); let the reference compute it on \
         the host"
    )]
    Unsupported {
        /// What was asked for.
        what: String,
        /// The GPU's name.
        gpu: String,
        /// Its architecture.
        arch: Arch,
    },
    /// Options that go with nothing.
    #[error(transparent)]
    Options(#[from] AttentionError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Quantise(#[from] QuantiseError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Forward(#[from] ForwardError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Retile(#[from] RetileError),
    #[allow(missing_docs)]
    #[error(transparent)]
    BackwardKeys(#[from] BackwardKeysError),
    #[allow(missing_docs)]
    #[error(transparent)]
    BackwardQueries(#[from] BackwardQueriesError),
    #[allow(missing_docs)]
    #[error(transparent)]
    BackwardFused(#[from] BackwardFusedError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// What the host knows of a call: shapes, and never where documents end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallShape {
    /// Rows of the packed row.
    pub tokens: usize,
    /// Documents, empty ones included: one less than `cu_seqlens` has entries.
    pub documents: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
}

impl CallShape {
    /// The shape of a call for these documents.
    pub fn of(documents: &Documents, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            tokens: documents.total(),
            documents: documents.len(),
            heads,
            kv_heads,
            head_dim,
        }
    }

    /// Rows of a document on average, empty ones included.
    fn mean_document(&self) -> usize {
        self.tokens / self.documents.max(1)
    }

    /// Query heads of a key/value head.
    fn group(&self) -> usize {
        (self.heads / self.kv_heads.max(1)).max(1)
    }
}

/// The kernels on one GPU, compiled as they are asked for.
pub struct Kernels {
    gpu: Gpu,
    schedule: Mutex<Option<ScheduleKernels>>,
    quantisers: Mutex<HashMap<Quantisation, Quantiser>>,
    forwards: Mutex<HashMap<ForwardConfig, Forward>>,
    retilers: Mutex<HashMap<Retiling, Retiler>>,
    backward_keys: Mutex<HashMap<BackwardKeysConfig, BackwardKeys>>,
    backward_queries: Mutex<HashMap<BackwardQueriesConfig, BackwardQueries>>,
    backward_fused: Mutex<HashMap<BackwardFusedConfig, BackwardFused>>,
}

impl Kernels {
    /// Compiles nothing yet.
    pub fn new(gpu: Gpu) -> Self {
        Self {
            gpu,
            schedule: Mutex::default(),
            quantisers: Mutex::default(),
            forwards: Mutex::default(),
            retilers: Mutex::default(),
            backward_keys: Mutex::default(),
            backward_queries: Mutex::default(),
            backward_fused: Mutex::default(),
        }
    }

    /// The GPU that they run on.
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Everything that forward calls of this shape need, compiled and laid out.
    ///
    /// # Errors
    /// The options go with nothing, or only the reference computes them.
    pub fn plan(&self, shape: CallShape, options: &Options) -> Result<ForwardPlan, CallError> {
        let forms = [Forms::Row, Forms::Row, Forms::Transposed];
        self.forward_plan(shape, options, forms, Tuning::default())
    }

    /// The same with these forms of Q, K and V, launched in this way.
    fn forward_plan(
        &self,
        shape: CallShape,
        options: &Options,
        [q, k, v]: [Forms; 3],
        tuning: Tuning,
    ) -> Result<ForwardPlan, CallError> {
        self.check(&shape, options)?;
        let config = ForwardConfig {
            head_dim: HeadDim::try_from(shape.head_dim)?,
            mask: options.mask,
            item_rows: item_rows(&shape),
        };
        let rotates = options.rotates(shape.head_dim);
        let kernel = cached(&self.forwards, config, || Forward::new(&self.gpu, config))?;
        let by_rule = sections::of_forward(&shape, options.mask, self.gpu.l2_bytes());
        Ok(ForwardPlan {
            shape,
            options: *options,
            q: self.operand(&shape, shape.heads, rotates, q, tuning.fuses_images)?,
            k: self.operand(&shape, shape.kv_heads, rotates, k, tuning.fuses_images)?,
            v: self.operand(&shape, shape.kv_heads, false, v, tuning.fuses_images)?,
            forward: kernel.starting_early(tuning.starts_early),
            schedule: ScheduleLayout::new(shape.tokens).map_err(ScheduleError::from)?,
            sections: tuning.sections.instead_of(by_rule, shape.group()),
            tuning,
        })
    }

    /// Gives the construction of a schedule for [`ForwardPlan::launch`] to the stream: once for all
    /// calls with the same documents and options.
    ///
    /// # Errors
    /// No compiler, or a launch that the driver refuses.
    ///
    /// # Safety
    /// - The stream is one of this GPU, and `self` is kept until the work has run.
    /// - `cu_seqlens` is the address of the plan's `documents + 1` boundaries, `i32`, and `schedule`
    ///   that of a buffer of [`ForwardPlan::schedule_layout`]; both are valid until the work has run,
    ///   and nothing else uses the buffer meanwhile.
    pub unsafe fn build_schedule(
        &self,
        stream: Stream<'_>,
        plan: &ForwardPlan,
        cu_seqlens: u64,
        schedule: u64,
    ) -> Result<(), CallError> {
        let call = BuildCall {
            cu_seqlens,
            entries: plan.shape.documents + 1,
            mask: plan.options.mask,
            item_rows: plan.tilings().map(|tiling| tiling.item_rows),
            section_rows: plan.tilings().map(|tiling| tiling.section_rows),
        };
        let mut kernels = self.schedule.lock().unwrap_or_else(PoisonError::into_inner);
        let kernels = match &mut *kernels {
            Some(kernels) => kernels,
            empty => empty.insert(ScheduleKernels::new(&self.gpu, Boundary::Int32)?),
        };
        // SAFETY: the caller vouches for the memory; the kernels live as long as `self`.
        unsafe { kernels.build(stream, &plan.schedule, schedule, &call)? };
        Ok(())
    }

    fn check(&self, shape: &CallShape, options: &Options) -> Result<(), CallError> {
        let unsupported = |what: String| CallError::Unsupported {
            what,
            gpu: self.gpu.name().to_owned(),
            arch: self.gpu.arch(),
        };
        if options.path != Path::Mxfp8 {
            return Err(unsupported(format!("path `{}`", options.path)));
        }
        if options.profile != Profile::Hopper {
            return Err(unsupported(format!("profile `{}`", options.profile)));
        }
        if !options.normalises_rounded() {
            return Err(unsupported(format!("normaliser `{}`", options.normaliser)));
        }
        if self.gpu.arch() != Arch::Sm90a {
            return Err(unsupported("attention".to_owned()));
        }
        if !HeadDim::SUPPORTED.contains(&shape.head_dim) {
            return Err(unsupported(format!("head dimension {}", shape.head_dim)));
        }
        Ok(options.validate(shape.head_dim)?)
    }
}

fn cached<K: Eq + Hash, V: Clone, E>(
    known: &Mutex<HashMap<K, V>>,
    key: K,
    make: impl FnOnce() -> Result<V, E>,
) -> Result<V, E> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(value) = known.get(&key) {
        return Ok(value.clone());
    }
    let value = make()?;
    known.insert(key, value.clone());
    Ok(value)
}
