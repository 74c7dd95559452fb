//! A whole call on a GPU: the schedule of a packed row, and the forward pass from BF16 to BF16.

use std::collections::HashMap;
use std::hash::Hash;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};

use flamia_cuda::{Arch, BuildError, Gpu, Stream};
use flamia_sched::cuda::{
    Boundary, BuildCall, ScheduleError, ScheduleHeader, ScheduleKernels, ScheduleLayout,
};
use flamia_sched::work::{HeadSections, Pass, Tiling};
use flamia_sched::{Documents, Mask};

use super::forward::{Forward, ForwardCall, ForwardConfig, ForwardError, ForwardWork, ItemRows};
use super::layout::{HeadDim, LayoutError};
use super::quantise::{
    Forms, Quantisation, QuantiseCall, QuantiseError, Quantised, QuantisedLayout, Quantiser,
};
use super::tensor::{DeviceTensor, Scratch, ScratchError};
use crate::error::AttentionError;
use crate::options::{Options, Path, Profile};

/// Share of the L2 cache that keys and values of one section of heads may take; queries, outputs and
/// the next section's pass through the rest.
const L2_SHARE: usize = 2;

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
}

/// The kernels on one GPU, compiled as they are asked for.
pub struct Kernels {
    gpu: Gpu,
    schedule: Mutex<Option<ScheduleKernels>>,
    quantisers: Mutex<HashMap<Quantisation, Quantiser>>,
    forwards: Mutex<HashMap<ForwardConfig, Forward>>,
}

impl Kernels {
    /// Compiles nothing yet.
    pub fn new(gpu: Gpu) -> Self {
        Self {
            gpu,
            schedule: Mutex::default(),
            quantisers: Mutex::default(),
            forwards: Mutex::default(),
        }
    }

    /// The GPU that they run on.
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Everything that calls of this shape need, compiled and laid out.
    ///
    /// # Errors
    /// The options go with nothing, or only the reference computes them.
    pub fn plan(&self, shape: CallShape, options: &Options) -> Result<ForwardPlan, CallError> {
        self.check(&shape, options)?;
        let head_dim = HeadDim::try_from(shape.head_dim)?;
        let config = ForwardConfig {
            head_dim,
            mask: options.mask,
            item_rows: item_rows(&shape),
        };
        let rotates = options.rotates(shape.head_dim);
        let operand = |hadamard, forms, heads| {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            let quantiser = cached(&self.quantisers, quantisation, || {
                Quantiser::new(&self.gpu, quantisation)
            })?;
            let layout = quantisation.layout(shape.tokens, shape.documents, heads)?;
            Ok::<_, CallError>(Operand { quantiser, layout })
        };
        Ok(ForwardPlan {
            shape,
            options: *options,
            q: operand(rotates, Forms::Row, shape.heads)?,
            k: operand(rotates, Forms::Row, shape.kv_heads)?,
            v: operand(false, Forms::Transposed, shape.kv_heads)?,
            forward: cached(&self.forwards, config, || Forward::new(&self.gpu, config))?,
            schedule: ScheduleLayout::new(shape.tokens).map_err(ScheduleError::from)?,
            sections: sections(&shape, options.mask, self.gpu.l2_bytes()),
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
        let mask = plan.options.mask;
        let call = BuildCall {
            cu_seqlens,
            entries: plan.shape.documents + 1,
            mask,
            item_rows: [
                plan.forward.config().tiling().item_rows,
                Tiling::backward(mask).item_rows,
            ],
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
        if self.gpu.arch() != Arch::Sm90a {
            return Err(unsupported("attention".to_owned()));
        }
        if !HeadDim::SUPPORTED.contains(&shape.head_dim) {
            return Err(unsupported(format!("head dimension {}", shape.head_dim)));
        }
        Ok(options.validate(shape.head_dim)?)
    }
}

/// Heads in sections whose keys and values the L2 cache holds pay where all items cost the same: under the
/// full mask, with documents as long as one another. Elsewhere every section starts with long items
/// again, and one was faster by 7 to 28 % on long causal rows, and by 9 % under the full mask with documents
/// of 500 rows on average beside a long one (bench/LOG.md).
fn sections(shape: &CallShape, mask: Mask, l2_bytes: usize) -> HeadSections {
    const SHORT: usize = 1024;
    let count = |n| NonZero::new(n).unwrap_or(NonZero::<usize>::MIN);
    let heads = count(shape.heads);
    if mask.is_causal() || shape.tokens / shape.documents.max(1) < SHORT {
        return HeadSections::whole(heads);
    }
    let group = count(shape.heads / shape.kv_heads.max(1));
    let bytes_per_row = (2 * shape.head_dim).div_ceil(group.get());
    HeadSections::fitting(
        heads,
        group,
        shape.tokens,
        bytes_per_row,
        l2_bytes / L2_SHARE,
    )
}

/// Query rows of an item. Warpgroups that share keys were faster on every row that was measured with documents
/// of 500 rows or more on average, those on their own with 291 (bench/LOG.md).
fn item_rows(shape: &CallShape) -> ItemRows {
    let mean = shape.tokens / shape.documents.max(1);
    if mean >= 384 {
        ItemRows::R192
    } else {
        ItemRows::R64
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

struct Operand {
    quantiser: Quantiser,
    layout: QuantisedLayout,
}

/// Calls of one shape with the same options.
pub struct ForwardPlan {
    shape: CallShape,
    options: Options,
    q: Operand,
    k: Operand,
    v: Operand,
    forward: Forward,
    schedule: ScheduleLayout,
    sections: HeadSections,
}

/// Where the codes of a call's operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes {
    q: Quantised,
    k: Quantised,
    v: Quantised,
}

/// Tensors of a call, and the boundaries of its documents.
#[derive(Clone, Copy, Debug)]
pub struct CallTensors {
    /// `[tokens, heads, head_dim]`.
    pub q: DeviceTensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub k: DeviceTensor,
    /// `[tokens, kv_heads, head_dim]`.
    pub v: DeviceTensor,
    /// `[tokens, heads, head_dim]`, written.
    pub o: DeviceTensor,
    /// Address of `f32` `[heads, tokens]`, written: natural logarithms, +∞ for a row that sees no
    /// key.
    pub lse: u64,
    /// Address of the `documents + 1` boundaries, `i32`.
    pub cu_seqlens: u64,
}

impl ForwardPlan {
    /// What it was made for.
    pub const fn shape(&self) -> &CallShape {
        &self.shape
    }

    /// The layout of the schedule that a call reads.
    pub const fn schedule_layout(&self) -> &ScheduleLayout {
        &self.schedule
    }

    /// Bytes of scratch that a call takes: the codes and scales of Q, K and V, and nothing else.
    pub const fn scratch_bytes(&self) -> usize {
        self.q.layout.bytes() + self.k.layout.bytes() + self.v.layout.bytes()
    }

    /// Quantises Q, K and V and computes O and LSE. Waits for nothing, and can be captured: the
    /// launches depend on the shape alone.
    ///
    /// Boundaries that no packed row has leave the schedule without work, and O and LSE as they were.
    ///
    /// # Errors
    /// A tensor or the scratch does not fit, or the driver refuses a launch.
    ///
    /// # Safety
    /// - The stream is one of the kernels' GPU, and this value is kept until the work has run (in a
    ///   graph: until the last replay has).
    /// - Until then everything behind the addresses is valid memory of that GPU, nothing else writes
    ///   what is read or touches O, LSE and the scratch, and calls that share the schedule run one
    ///   after another.
    /// - `schedule` was built by [`Kernels::build_schedule`] with this plan, for the same boundaries.
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        tensors: &CallTensors,
        schedule: u64,
        scratch: Scratch,
    ) -> Result<(), CallError> {
        // SAFETY: the caller vouches for everything; the operands are quantised for these boundaries
        // before they are read.
        unsafe {
            let codes = self.quantise(stream, tensors, scratch)?;
            self.attend(stream, tensors, &codes, schedule)
        }
    }

    /// The first half of [`ForwardPlan::launch`]: quantises Q, K and V into the scratch.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, but for O, LSE and the schedule.
    pub unsafe fn quantise(
        &self,
        stream: Stream<'_>,
        tensors: &CallTensors,
        scratch: Scratch,
    ) -> Result<Codes, CallError> {
        scratch.check("q, k and v", self.scratch_bytes())?;
        let mut free = scratch;
        let mut is_first = true;
        let mut quantised = |operand: &Operand, input| {
            let (here, rest) = free.split(operand.layout.bytes());
            free = rest;
            let call = QuantiseCall {
                input,
                output: None,
                cu_seqlens: tensors.cu_seqlens,
                documents: self.shape.documents,
            };
            // SAFETY: the caller vouches for the tensors and the scratch, of which each operand has
            // its own part; only the first follows work that it may depend on.
            unsafe {
                if std::mem::take(&mut is_first) {
                    operand.quantiser.launch(stream, &call, here)
                } else {
                    operand.quantiser.launch_after(stream, &call, here)
                }
            }
        };
        Ok(Codes {
            q: quantised(&self.q, tensors.q)?,
            k: quantised(&self.k, tensors.k)?,
            v: quantised(&self.v, tensors.v)?,
        })
    }

    /// The second half: computes O and LSE from what is quantised.
    ///
    /// # Errors
    /// As [`ForwardPlan::launch`].
    ///
    /// # Safety
    /// As there, but for Q, K and V, which are not read; the codes are what
    /// [`ForwardPlan::quantise`] gave for these boundaries on the same stream, and the scratch is as
    /// that left it.
    pub unsafe fn attend(
        &self,
        stream: Stream<'_>,
        tensors: &CallTensors,
        codes: &Codes,
        schedule: u64,
    ) -> Result<(), CallError> {
        let call = ForwardCall {
            q: codes.q,
            k: codes.k,
            v: codes.v,
            kv_heads: self.shape.kv_heads,
            o: tensors.o,
            lse: tensors.lse,
            documents: self.shape.documents,
            work: ForwardWork::of(&self.schedule, schedule),
            sections: self.sections,
            counter: schedule
                + (self.schedule.header + ScheduleHeader::counter_offset(Pass::Forward)) as u64,
            scale: self.options.softmax_scale(self.shape.head_dim),
            c: self.options.c,
            tau: self.options.tau,
        };
        // SAFETY: the caller vouches for the codes, the schedule and the outputs.
        unsafe { self.forward.launch(stream, &call)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_mask_decide_how_heads_and_rows_are_cut() {
        let shape = CallShape {
            tokens: 16_384,
            documents: 4,
            heads: 16,
            kv_heads: 4,
            head_dim: 128,
        };
        let per_section = |mask| sections(&shape, mask, 64 << 20).per_section();
        assert_eq!(per_section(Mask::Causal), 16);
        assert_eq!(per_section(Mask::window(100)), 16);
        // 64 bytes a row and query head: 32 heads would fit half of the cache.
        assert_eq!(per_section(Mask::Full), 16);
        let long = CallShape {
            tokens: 131_072,
            ..shape
        };
        assert_eq!(sections(&long, Mask::Full, 64 << 20).per_section(), 4);
        let short = CallShape {
            documents: 129,
            ..long
        };
        assert_eq!(sections(&short, Mask::Full, 64 << 20).per_section(), 16);

        let rows = |documents| item_rows(&CallShape { documents, ..shape });
        assert_eq!(rows(42), ItemRows::R192);
        assert_eq!(rows(43), ItemRows::R64);
        assert_eq!(rows(0), ItemRows::R192);
    }
}
