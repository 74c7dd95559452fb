//! The training call: a forward pass that saves codes, and the backward pass from them.

use flamia_cuda::Stream;
use flamia_sched::work::{HeadSections, Pass};

use super::form::{FormChoice, FormKernels, dq_sums, form_of};
use super::forward::{Codes, ForwardPlan};
use super::operand::Operand;
use super::tuning::Tuning;
use super::{CallError, CallShape, Kernels, cached, sections};
use crate::cuda::backward_fused::{BackwardFused, BackwardFusedCall, BackwardFusedConfig};
use crate::cuda::backward_keys::{
    BackwardKeys, BackwardKeysCall, BackwardKeysConfig, BackwardWork,
};
use crate::cuda::backward_queries::{BackwardQueries, BackwardQueriesCall, BackwardQueriesConfig};
use crate::cuda::layout::HeadDim;
use crate::cuda::quantise::{Forms, ForwardOutput, QuantiseCall, Quantised};
use crate::cuda::retile::{Image, Retiler};
use crate::cuda::tensor::{DeviceTensor, Scratch};
use crate::options::{BackwardForm, Options};

/// Of Q, K and V, what the forward pass reads.
const ONE_IMAGE: [Forms; 3] = [Forms::Row, Forms::Row, Forms::Transposed];

/// What a forward pass keeps of Q, K and V for the backward pass, beside their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum SavedImages {
    /// The images that the forward pass reads, a byte per element: half of what BF16 operands take. The
    /// backward pass makes the others from them, in scratch.
    #[default]
    One,
    /// Both, two bytes per element: the backward pass moves none, and the forward pass writes them from
    /// what it has read anyway.
    Both,
}

impl SavedImages {
    /// Those of Q, K and V, and which of them the backward pass makes. One kernel reads no transposed image
    /// of Q and K.
    const fn forms(self, is_one_kernel: bool) -> ([Forms; 3], [Option<Image>; 3]) {
        let to_row = Some(Image::Row);
        match (self, is_one_kernel) {
            (SavedImages::One, true) => (ONE_IMAGE, [None, None, to_row]),
            (SavedImages::One, false) => {
                let transposed = Some(Image::Transposed);
                (ONE_IMAGE, [transposed, transposed, to_row])
            }
            (SavedImages::Both, true) => ([Forms::Row, Forms::Row, Forms::Both], [None; 3]),
            (SavedImages::Both, false) => ([Forms::Both; 3], [None; 3]),
        }
    }
}

/// Training calls of one shape with the same options.
pub struct TrainingPlan {
    forward: ForwardPlan,
    /// For the images of Q, K and V that the backward pass reads and that were not saved.
    retilers: [Option<Retiler>; 3],
    d_o: Operand,
    choice: FormChoice,
    form: FormKernels,
    key_sections: HeadSections,
    tuning: Tuning,
}

/// Tensors of a backward pass, and the boundaries of its documents.
#[derive(Clone, Copy, Debug)]
pub struct BackwardTensors {
    /// The forward pass's O, `[tokens, heads, head_dim]`.
    pub o: DeviceTensor,
    /// Address of its LSE, `f32` `[heads, tokens]`.
    pub lse: u64,
    /// `[tokens, heads, head_dim]`.
    pub d_o: DeviceTensor,
    /// `[tokens, heads, head_dim]`, written.
    pub dq: DeviceTensor,
    /// `[tokens, kv_heads, head_dim]`, written.
    pub dk: DeviceTensor,
    /// `[tokens, kv_heads, head_dim]`, written.
    pub dv: DeviceTensor,
    /// Address of the `documents + 1` boundaries, `i32`.
    pub cu_seqlens: u64,
}

/// Where the codes of a backward pass's operands are, and what it adds dQ up in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardCodes {
    /// Of Q, K, V and dO.
    operands: [Quantised; 4],
    dq_sums: Scratch,
}

impl Kernels {
    /// Everything that training calls of this shape need, compiled and laid out. The form of the backward pass
    /// is settled here, by [`form_of`].
    ///
    /// # Errors
    /// The options go with nothing, are for inference only, or only the reference computes them.
    pub fn training_plan(
        &self,
        shape: CallShape,
        options: &Options,
        images: SavedImages,
    ) -> Result<TrainingPlan, CallError> {
        self.tuned_training_plan(shape, options, images, Tuning::default())
    }

    /// The same, launched in another way.
    ///
    /// # Errors
    /// As there.
    pub fn tuned_training_plan(
        &self,
        shape: CallShape,
        options: &Options,
        images: SavedImages,
        tuning: Tuning,
    ) -> Result<TrainingPlan, CallError> {
        let choice = form_of(&shape, options);
        let options = &Options {
            backward: choice.form,
            ..*options
        };
        let (forms, made) = images.forms(choice.form == BackwardForm::OneKernel);
        let forward = self.forward_plan(shape, options, forms, tuning)?;
        options.validate_training(shape.head_dim)?;
        let head_dim = HeadDim::try_from(shape.head_dim)?;
        let (form, shared_images) = self.form(&shape, options, tuning)?;
        let l2_bytes = self.gpu().l2_bytes();
        let by_rule = sections::of_keys(&shape, shared_images, options.mask, l2_bytes);
        let retiler = |image: Option<Image>| image.map(|to| self.retiler(head_dim, to)).transpose();
        let [q, k, v] = made;
        Ok(TrainingPlan {
            retilers: [retiler(q)?, retiler(k)?, retiler(v)?],
            choice,
            d_o: self.operand(&shape, shape.heads, false, Forms::BothWithRowSums, true)?,
            form,
            key_sections: tuning.sections.instead_of(by_rule, 1),
            tuning,
            forward,
        })
    }

    /// The kernels of the backward pass, and what those whose items are keys share: images of a code per
    /// query and feature.
    fn form(
        &self,
        shape: &CallShape,
        options: &Options,
        tuning: Tuning,
    ) -> Result<(FormKernels, usize), CallError> {
        // Both of Q and of dO; with one kernel two of them are values, of two bytes.
        const QUERY_IMAGES: usize = 4;
        // Both of K, and one of V.
        const KEY_IMAGES: usize = 3;
        let head_dim = HeadDim::try_from(shape.head_dim)?;
        let (mask, rotated) = (options.mask, options.rotates(shape.head_dim));
        let keys = BackwardKeysConfig {
            head_dim,
            mask,
            rotated,
        };
        if options.backward == BackwardForm::OneKernel {
            let sums = dq_sums(options);
            let config = BackwardFusedConfig { keys, sums };
            let CallShape {
                tokens,
                documents,
                heads,
                kv_heads,
                ..
            } = *shape;
            let kernels = cached(&self.backward_fused, config, || {
                BackwardFused::new(self.gpu(), config)
            })?;
            let form = FormKernels::One {
                kernels: kernels.starting_early(tuning.starts_early),
                sums: config.scratch(tokens, documents, heads, kv_heads)?.bytes(),
            };
            return Ok((form, QUERY_IMAGES + 1 + sums.bytes() as usize));
        }
        let queries = BackwardQueriesConfig {
            head_dim,
            mask,
            rotated,
        };
        let l2_bytes = self.gpu().l2_bytes();
        let by_rule = sections::of_queries(shape, KEY_IMAGES, mask, l2_bytes);
        let kernel = cached(&self.backward_keys, keys, || {
            BackwardKeys::new(self.gpu(), keys)
        })?;
        let form = FormKernels::Two {
            keys: kernel.starting_early(tuning.starts_early),
            queries: cached(&self.backward_queries, queries, || {
                BackwardQueries::new(self.gpu(), queries)
            })?,
            query_sections: tuning.sections.instead_of(by_rule, shape.group()),
        };
        Ok((form, QUERY_IMAGES))
    }
}

impl TrainingPlan {
    /// The forward pass. Its scratch is what is saved: give it [`TrainingPlan::saved_bytes`] that live
    /// until the backward pass has run.
    pub const fn forward(&self) -> &ForwardPlan {
        &self.forward
    }

    /// The form of the backward pass, and what decided.
    pub const fn form(&self) -> FormChoice {
        self.choice
    }

    /// Bytes of codes and scales that a forward pass saves for the backward pass, beside O and LSE.
    pub const fn saved_bytes(&self) -> usize {
        self.forward.scratch_bytes()
    }

    /// Bytes of scratch that a backward pass takes: dO quantised, the images that were not saved, and with
    /// one kernel what dQ is added up in and BF16 values of Q.
    pub fn scratch_bytes(&self) -> usize {
        self.d_o.bytes() + self.images_bytes() + self.form.scratch_bytes()
    }

    /// Bytes of the images that were not saved.
    fn images_bytes(&self) -> usize {
        let made = self.retilers.iter().zip(self.operands());
        made.filter(|(retiler, _)| retiler.is_some())
            .map(|(_, operand)| operand.image_bytes())
            .sum()
    }

    fn operands(&self) -> [&Operand; 3] {
        [&self.forward.q, &self.forward.k, &self.forward.v]
    }

    /// Computes dQ, dK and dV from what a forward pass of this plan saved. Waits for nothing, and can be
    /// captured: the launches depend on the shape alone. The saved bytes are read alone, and serve any number
    /// of backward passes.
    ///
    /// Boundaries that no packed row has leave the schedule without work, and the gradients as they were.
    ///
    /// # Errors
    /// A tensor or the scratch does not fit, or the driver refuses a launch.
    ///
    /// # Safety
    /// - The stream is one of the kernels' GPU, and this value is kept until the work has run (in a
    ///   graph: until the last replay has).
    /// - Until then everything behind the addresses is valid memory of that GPU, nothing else writes
    ///   what is read or touches the gradients and the scratch, and calls that share the schedule run
    ///   one after another.
    /// - `saved` is as [`ForwardPlan::launch`] left it as its scratch, and `schedule` was built by
    ///   [`Kernels::build_schedule`] with this plan's forward pass, both for the same boundaries.
    pub unsafe fn backward(
        &self,
        stream: Stream<'_>,
        tensors: &BackwardTensors,
        schedule: u64,
        saved: Scratch,
        scratch: Scratch,
    ) -> Result<(), CallError> {
        // SAFETY: the caller vouches for everything.
        unsafe {
            let codes = self.prepare(stream, tensors, saved, scratch)?;
            self.gradients(stream, tensors, &codes, schedule)
        }
    }

    /// The first half of [`TrainingPlan::backward`]: quantises dO and makes the images that were not saved.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, but for the gradients and the schedule.
    pub unsafe fn prepare(
        &self,
        stream: Stream<'_>,
        tensors: &BackwardTensors,
        saved: Scratch,
        scratch: Scratch,
    ) -> Result<BackwardCodes, CallError> {
        scratch.check("the backward pass", self.scratch_bytes())?;
        let (for_d_o, rest) = scratch.split(self.d_o.bytes());
        let (for_images, dq_sums) = rest.split(self.images_bytes());
        let call = QuantiseCall {
            input: tensors.d_o,
            output: Some(ForwardOutput {
                o: tensors.o,
                lse: tensors.lse,
            }),
            cu_seqlens: tensors.cu_seqlens,
            documents: self.forward.shape.documents,
        };
        // SAFETY: the caller vouches for the tensors, what was saved and the scratch, of which each has
        // its own part.
        unsafe {
            let Codes { q, k, v } =
                self.complete(stream, self.forward.codes(saved)?, for_images)?;
            let d_o = self.d_o.quantise(stream, &call, for_d_o, false)?;
            Ok(BackwardCodes {
                operands: [q, k, v, d_o],
                dq_sums,
            })
        }
    }

    /// Makes the images that were not saved.
    ///
    /// # Safety
    /// As [`TrainingPlan::backward`].
    unsafe fn complete(
        &self,
        stream: Stream<'_>,
        mut codes: Codes,
        scratch: Scratch,
    ) -> Result<Codes, CallError> {
        let mut free = scratch;
        let parts = [&mut codes.q, &mut codes.k, &mut codes.v];
        for ((retiler, operand), part) in self.retilers.iter().zip(self.operands()).zip(parts) {
            let Some(retiler) = retiler else { continue };
            let padded = operand.layout.padded();
            let (here, rest) = free.split(padded.image_bytes());
            free = rest;
            let (from, made) = match (part.row_image, part.transposed_image) {
                (Some(row), None) => (row, &mut part.transposed_image),
                (None, Some(transposed)) => (transposed, &mut part.row_image),
                (Some(_), Some(_)) | (None, None) => continue,
            };
            // SAFETY: the caller vouches for both; the layout is the operand's.
            unsafe { retiler.launch(stream, from, here.address, padded)? };
            *made = Some(here.address);
        }
        Ok(codes)
    }

    /// The second half: computes dQ, dK and dV from what is quantised. With two kernels they are the same
    /// bits in every run; with one kernel dK and dV are.
    ///
    /// # Errors
    /// As [`TrainingPlan::backward`].
    ///
    /// # Safety
    /// As there, but for O, LSE and dO, which are not read; the codes are what [`TrainingPlan::prepare`] gave
    /// for these boundaries on the same stream, and what was saved and the scratch are as that left them.
    pub unsafe fn gradients(
        &self,
        stream: Stream<'_>,
        tensors: &BackwardTensors,
        codes: &BackwardCodes,
        schedule: u64,
    ) -> Result<(), CallError> {
        let BackwardCodes {
            operands: [q, k, v, d_o],
            dq_sums,
        } = *codes;
        let ForwardPlan { shape, options, .. } = &self.forward;
        let scale = options.softmax_scale(shape.head_dim);
        let work = BackwardWork::of(&self.forward.schedule, schedule);
        let counter = |pass| self.forward.counter(schedule, pass);
        let call = BackwardKeysCall {
            q,
            k,
            v,
            d_o,
            heads: shape.heads,
            dk: tensors.dk,
            dv: tensors.dv,
            documents: shape.documents,
            work,
            sections: self.key_sections,
            counter: counter(Pass::Backward),
            scale,
            hysteresis: options.hysteresis,
        };
        match &self.form {
            FormKernels::One { kernels, .. } => {
                let call = BackwardFusedCall {
                    keys: call,
                    dq: tensors.dq,
                    cu_seqlens: tensors.cu_seqlens,
                    scratch: dq_sums,
                };
                // SAFETY: the caller vouches for the codes, the schedule, the scratch and the outputs.
                unsafe { kernels.launch(stream, &call)? };
            }
            FormKernels::Two {
                keys,
                queries,
                query_sections,
            } => {
                let of_queries = BackwardQueriesCall {
                    q,
                    d_o,
                    k,
                    v,
                    kv_heads: shape.kv_heads,
                    dq: tensors.dq,
                    documents: shape.documents,
                    work,
                    sections: *query_sections,
                    // The other kernel may still be at work; no forward pass is.
                    counter: counter(Pass::Forward),
                    scale,
                    hysteresis: options.hysteresis,
                };
                // SAFETY: the caller vouches for the codes, the schedule and the outputs; both kernels take
                // the backward pass's items, with a counter each.
                unsafe {
                    keys.launch(stream, &call)?;
                    if self.tuning.overlaps_gradients {
                        queries.launch_after_keys(stream, &of_queries)?;
                    } else {
                        queries.launch(stream, &of_queries)?;
                    }
                }
            }
        }
        Ok(())
    }
}
