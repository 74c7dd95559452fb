//! The forward pass, from BF16 to BF16.

use flamia_cuda::Stream;
use flamia_sched::cuda::{ScheduleHeader, ScheduleLayout};
use flamia_sched::work::{HeadSections, Pass, Tiling};

use super::operand::Operand;
use super::tuning::Tuning;
use super::{CallError, CallShape, sections};
use crate::cuda::forward::{Forward, ForwardCall, ForwardWork, ItemRows};
use crate::cuda::quantise::{QuantiseCall, Quantised};
use crate::cuda::tensor::{DeviceTensor, Scratch};
use crate::options::Options;

/// Query rows of an item. Warpgroups that share keys were faster on every row that was measured with documents
/// of 500 rows or more on average, those on their own with 291 (bench/LOG.md).
pub(super) fn item_rows(shape: &CallShape) -> ItemRows {
    if shape.mean_document() >= 384 {
        ItemRows::R192
    } else {
        ItemRows::R64
    }
}

/// Forward calls of one shape with the same options.
pub struct ForwardPlan {
    pub(super) shape: CallShape,
    pub(super) options: Options,
    pub(super) q: Operand,
    pub(super) k: Operand,
    pub(super) v: Operand,
    pub(super) forward: Forward,
    pub(super) schedule: ScheduleLayout,
    pub(super) sections: HeadSections,
    pub(super) tuning: Tuning,
}

/// Where the codes of a call's operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes {
    pub(super) q: Quantised,
    pub(super) k: Quantised,
    pub(super) v: Quantised,
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

    /// How the schedule cuts documents into the items of the forward pass and of the backward pass.
    pub fn tilings(&self) -> [Tiling; 2] {
        [
            self.forward.config().tiling(),
            Tiling::backward(self.options.mask)
                .with_section_rows(sections::backward_rows(&self.shape)),
        ]
    }

    /// Bytes of scratch that a call takes: the codes and scales of Q, K and V, and nothing else.
    pub const fn scratch_bytes(&self) -> usize {
        self.q.bytes() + self.k.bytes() + self.v.bytes()
    }

    /// The address of the counter that a pass's launches acquire work with.
    pub(super) fn counter(&self, schedule: u64, pass: Pass) -> u64 {
        schedule + (self.schedule.header + ScheduleHeader::counter_offset(pass)) as u64
    }

    /// Where codes lie in scratch that a call quantised into.
    pub(super) fn codes(&self, scratch: Scratch) -> Result<Codes, CallError> {
        scratch.check("q, k and v", self.scratch_bytes())?;
        let mut free = scratch;
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|operand| {
            let (here, rest) = free.split(operand.bytes());
            free = rest;
            operand.at(here.address)
        });
        Ok(Codes { q, k, v })
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
    /// - `schedule` was built by [`Kernels::build_schedule`](super::Kernels::build_schedule) with this plan, for the same
    ///   boundaries.
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
            let (here, rest) = free.split(operand.bytes());
            free = rest;
            let call = QuantiseCall {
                input,
                output: None,
                cu_seqlens: tensors.cu_seqlens,
                documents: self.shape.documents,
            };
            let starts_early = self.tuning.starts_early && !std::mem::take(&mut is_first);
            // SAFETY: the caller vouches for the tensors and the scratch, of which each operand has
            // its own part; only the first follows work that it may depend on.
            unsafe { operand.quantise(stream, &call, here, starts_early) }
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
            counter: self.counter(schedule, Pass::Forward),
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
    fn short_documents_have_short_items() {
        let rows = |documents| {
            item_rows(&CallShape {
                tokens: 16_384,
                documents,
                heads: 16,
                kv_heads: 4,
                head_dim: 128,
            })
        };
        assert_eq!(rows(42), ItemRows::R192);
        assert_eq!(rows(43), ItemRows::R64);
        assert_eq!(rows(0), ItemRows::R192);
    }
}
