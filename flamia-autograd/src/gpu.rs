//! Attention on tensors that lie on a GPU: the kernels, with torch's memory and torch's streams.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use flamia_cuda::{Gpu, GpuError, Stream};
use flamia_kernels::cuda::call::{
    BackwardTensors, CallError, CallShape, CallTensors, ForwardPlan, Kernels, ONE_KERNEL_ROWS,
    ONE_KERNEL_ROWS_FP32, SavedImages, TrainingPlan,
};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_kernels::{Options, Profile};
use flamia_sched::Documents;
use tch::{Device, Kind, TchError, Tensor};

use crate::attention::{Call, refuse_second_derivative};
use crate::cuda::{CurrentStreamError, current_stream};
use crate::error::FunctionError;
use crate::function::{BackwardContext, ForwardContext, Function};

/// Why a GPU did not compute a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuCallError {
    /// What the kernels do not compute, or refuse.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The GPU cannot be used.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// torch's stream is not to be had.
    #[error(transparent)]
    Stream(#[from] CurrentStreamError),
    /// torch refuses a tensor.
    #[error(transparent)]
    Torch(#[from] TchError),
    /// Tensors that lie on no GPU.
    #[error("q is on {device:?}: this call is for tensors on a GPU")]
    NoGpu {
        /// The device of Q.
        device: Device,
    },
    /// An operand that is not what kernels read.
    #[error("{tensor} is {found}: give BFloat16 of shape [rows, heads, head_dim] on {device:?}")]
    Operand {
        /// `q`, `k` or `v`.
        tensor: &'static str,
        /// Kind, shape and device.
        found: String,
        /// The device of Q.
        device: Device,
    },
    /// Boundaries that are not what kernels read.
    #[error(
        "cu_seqlens is {found}: give a contiguous one-dimensional Int tensor on {device:?}, with an \
         entry more than documents"
    )]
    Boundaries {
        /// Kind, shape and device.
        found: String,
        /// The device of Q.
        device: Device,
    },
}

/// O and LSE of packed documents, computed on the GPU that the tensors lie on.
///
/// `q` is `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`, all BF16, with any
/// strides that keep rows aligned to 16 bytes; `cu_seqlens` is `[documents + 1]`, Int, on the same
/// GPU, and may end in repetitions of `rows`. O has the shape of `q`; LSE is `[heads, rows]`, Float,
/// natural logarithms.
///
/// Nothing waits for the GPU, and all of it can be captured in a CUDA graph: the host never learns
/// where documents end. Not differentiable: see [`attention`](crate::attention()).
///
/// Boundaries that no packed row has leave O and LSE undefined; [`Documents::from_cu_seqlens`] says
/// of a copy on the host what is wrong with it.
///
/// # Errors
/// See [`GpuCallError`]; nothing is computed then.
pub fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cu_seqlens: &Tensor,
    options: &Options,
) -> Result<(Tensor, Tensor), GpuCallError> {
    let device = q.device();
    let size = cu_seqlens.size();
    if (cu_seqlens.device(), cu_seqlens.kind()) != (device, Kind::Int)
        || !matches!(size[..], [entries] if entries >= 2)
        || !cu_seqlens.is_contiguous()
    {
        let (kind, on) = (cu_seqlens.kind(), cu_seqlens.device());
        return Err(GpuCallError::Boundaries {
            found: format!("{kind:?} of shape {size:?} on {on:?}"),
            device,
        });
    }
    let gpu = Place::of(device)?;
    let plan = gpu.kernels.plan(
        CallShape {
            documents: size[0] as usize - 1,
            ..shape(q, k)
        },
        &native(options),
    )?;
    let scheduled = Scheduled {
        boundaries: cu_seqlens.shallow_clone(),
        schedule: gpu.build_schedule(&plan, cu_seqlens)?,
    };
    let scratch = gpu.bytes(plan.scratch_bytes())?;
    gpu.forward(&plan, [q, k, v], &scheduled, &scratch)
}

/// Says whether a GPU computes calls with these options, and compiles kernels for them: what takes
/// seconds, or is refused, is so before the first step of a long run.
///
/// # Errors
/// See [`GpuCallError`].
pub fn prepare_gpu(
    device: Device,
    options: &Options,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> Result<(), GpuCallError> {
    let (kernels, options) = (Place::of(device)?.kernels, native(options));
    // Kernels are chosen by the length of documents.
    for tokens in [1, ONE_KERNEL_ROWS, ONE_KERNEL_ROWS_FP32] {
        let shape = CallShape {
            tokens,
            documents: 1,
            heads,
            kv_heads,
            head_dim,
        };
        if options.validate_training(head_dim).is_ok() {
            kernels.training_plan(shape, &options, SavedImages::default())?;
        } else {
            kernels.plan(shape, &options)?;
        }
    }
    Ok(())
}

/// Boundaries on the GPU, and the schedule that was built from them.
struct Scheduled {
    boundaries: Tensor,
    schedule: Tensor,
}

impl Scheduled {
    /// The same tensors.
    fn shallow_clone(&self) -> Self {
        Self {
            boundaries: self.boundaries.shallow_clone(),
            schedule: self.schedule.shallow_clone(),
        }
    }

    /// For documents that the host has. Kept for the next call with the same documents and options on
    /// the same stream, so that the layers of a model share it.
    fn of(
        gpu: &Place,
        plan: &ForwardPlan,
        documents: &Documents,
        options: &Options,
    ) -> Result<Self, GpuCallError> {
        /// What was scheduled last, and for whom.
        struct Last {
            documents: Documents,
            options: Options,
            shape: CallShape,
            device: Device,
            scheduled: Scheduled,
        }
        /// By stream. Never dropped: at the end of the process torch's allocator is gone first.
        static LAST: OnceLock<Mutex<HashMap<usize, Last>>> = OnceLock::new();

        let mut last = LAST
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let stream = gpu.stream.as_raw() as usize;
        if let Some(last) = last.get(&stream)
            && last.device == gpu.device
            && last.shape == *plan.shape()
            && last.options == *options
            && last.documents == *documents
        {
            return Ok(last.scheduled.shallow_clone());
        }
        let boundaries = Tensor::f_from_slice(documents.cu_seqlens())?.f_to_device(gpu.device)?;
        let scheduled = Self {
            schedule: gpu.build_schedule(plan, &boundaries)?,
            boundaries,
        };
        let now = Last {
            documents: documents.clone(),
            options: *options,
            shape: *plan.shape(),
            device: gpu.device,
            scheduled: scheduled.shallow_clone(),
        };
        last.insert(stream, now);
        Ok(scheduled)
    }
}

/// On a GPU the profile of its own arithmetic is meant where none is named. Its kernels draw no random bits:
/// calls that differ in their seed alone are the same, and share a schedule.
fn native(options: &Options) -> Options {
    let mut options = *options;
    options.seed = 0;
    if options.profile == Profile::Auto {
        options.profile = Profile::Hopper;
    }
    options
}

/// Attention of BF16 tensors on a GPU. Saved for the backward pass are the codes of Q, K and V, one byte per
/// element, beside O and LSE, and no BF16 operand.
pub(crate) struct GpuAttention {
    call: Call,
    /// The shape of K and V, and of their gradients.
    kv_size: Vec<i64>,
}

impl GpuAttention {
    pub fn new(call: Call) -> Self {
        Self {
            call,
            kv_size: Vec::new(),
        }
    }
}

impl Function for GpuAttention {
    fn name(&self) -> Cow<'static, str> {
        self.call.name()
    }

    fn forward(
        &mut self,
        ctx: &mut ForwardContext,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, FunctionError> {
        let [q, k, v] = [0, 1, 2].map(|i| inputs[i].expect("attention passes q, k and v"));
        self.kv_size = k.size();
        let (rows_q, rows_k, rows_v) = (readable_rows(q)?, readable_rows(k)?, readable_rows(v)?);
        let is_differentiated = (0..3).any(|i| ctx.needs_input_grad(i));
        let o = self
            .compute(ctx, [&rows_q, &rows_k, &rows_v], is_differentiated)
            .map_err(FunctionError::custom)?;
        Ok(vec![o.f_view(&q.size()[..])?])
    }

    fn backward(
        &self,
        ctx: &BackwardContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>, FunctionError> {
        refuse_second_derivative(ctx)?;
        let Some(d_o) = &grads[0] else {
            return Ok(vec![None, None, None]);
        };
        let d_o = d_o.f_to_kind(Kind::BFloat16)?;
        let [dq, dk, dv] = self
            .gradients(ctx.saved(), &readable_rows(&d_o)?)
            .map_err(FunctionError::custom)?;
        Ok(vec![
            Some(dq.f_view(&d_o.size()[..])?),
            Some(dk.f_view(&self.kv_size[..])?),
            Some(dv.f_view(&self.kv_size[..])?),
        ])
    }
}

impl GpuAttention {
    /// O of rows.
    fn compute(
        &self,
        ctx: &mut ForwardContext,
        [q, k, v]: [&Tensor; 3],
        is_differentiated: bool,
    ) -> Result<Tensor, GpuCallError> {
        let gpu = Place::of(q.device())?;
        let Call {
            documents, options, ..
        } = &self.call;
        let options = native(options);
        let shape = CallShape {
            documents: documents.len(),
            ..shape(q, k)
        };
        if !is_differentiated {
            let plan = gpu.kernels.plan(shape, &options)?;
            let scheduled = Scheduled::of(&gpu, &plan, documents, &options)?;
            let scratch = gpu.bytes(plan.scratch_bytes())?;
            return Ok(gpu.forward(&plan, [q, k, v], &scheduled, &scratch)?.0);
        }
        let images = SavedImages::default();
        let plan = gpu.kernels.training_plan(shape, &options, images)?;
        let scheduled = Scheduled::of(&gpu, plan.forward(), documents, &options)?;
        let codes = gpu.bytes(plan.saved_bytes())?;
        let (o, lse) = gpu.forward(plan.forward(), [q, k, v], &scheduled, &codes)?;
        // The schedule with them: the next row's may have replaced it by then.
        let Scheduled {
            boundaries,
            schedule,
        } = &scheduled;
        ctx.save_for_backward(&[&codes, &o, &lse, boundaries, schedule]);
        Ok(o)
    }

    /// dQ, dK and dV of rows, from what was saved.
    fn gradients(&self, saved: &[Tensor], d_o: &Tensor) -> Result<[Tensor; 3], GpuCallError> {
        let [codes, o, lse, boundaries, schedule] = [0, 1, 2, 3, 4].map(|i| &saved[i]);
        let gpu = Place::of(o.device())?;
        let options = native(&self.call.options);
        let [.., kv_heads, head_dim] = self.kv_size[..] else {
            unreachable!("the forward pass has seen K's heads");
        };
        let (rows, heads) = (d_o.size()[0], d_o.size()[1]);
        let shape = CallShape {
            tokens: rows as usize,
            documents: self.call.documents.len(),
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
        };
        let images = SavedImages::default();
        let plan = gpu.kernels.training_plan(shape, &options, images)?;
        let scheduled = Scheduled {
            boundaries: boundaries.shallow_clone(),
            schedule: schedule.shallow_clone(),
        };
        let gradient = |heads| {
            let kind = (Kind::BFloat16, gpu.device);
            Tensor::f_empty([rows, heads, head_dim], kind)
        };
        let gradients = [gradient(heads)?, gradient(kv_heads)?, gradient(kv_heads)?];
        gpu.backward(&plan, [o, lse, d_o], &gradients, &scheduled, codes)?;
        Ok(gradients)
    }
}

/// The tensor as `[rows, heads, head_dim]`, copied only where kernels cannot read it as it lies.
fn readable_rows(tensor: &Tensor) -> Result<Tensor, TchError> {
    let size = tensor.size();
    let [.., heads, head_dim] = size[..] else {
        return Ok(tensor.shallow_clone());
    };
    let rows = tensor.detach().f_reshape([-1, heads, head_dim])?;
    if device_tensor("rows", &rows).is_readable() {
        Ok(rows)
    } else {
        rows.f_contiguous()
    }
}

/// The shape of a call, but for its documents. A dimension that is not there is 0: nothing is planned
/// for that.
fn shape(q: &Tensor, k: &Tensor) -> CallShape {
    let size = |tensor: &Tensor, i: usize| tensor.size().get(i).map_or(0, |&size| size as usize);
    CallShape {
        tokens: size(q, 0),
        documents: 0,
        heads: size(q, 1),
        kv_heads: size(k, 1),
        head_dim: size(q, 2),
    }
}

fn device_tensor(name: &'static str, tensor: &Tensor) -> DeviceTensor {
    let three = |sizes: Vec<i64>| [0, 1, 2].map(|i| sizes.get(i).map_or(0, |&size| size as usize));
    DeviceTensor {
        name,
        address: address(tensor),
        shape: three(tensor.size()),
        strides: three(tensor.stride()),
    }
}

fn address(tensor: &Tensor) -> u64 {
    tensor.data_ptr() as u64
}

/// A GPU as torch uses it now.
struct Place {
    device: Device,
    kernels: Arc<Kernels>,
    stream: Stream<'static>,
}

impl Place {
    fn of(device: Device) -> Result<Self, GpuCallError> {
        /// By ordinal; loaded for the rest of the process.
        static LOADED: OnceLock<Mutex<HashMap<usize, Arc<Kernels>>>> = OnceLock::new();

        let Device::Cuda(ordinal) = device else {
            return Err(GpuCallError::NoGpu { device });
        };
        let mut loaded = LOADED
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let kernels = match loaded.get(&ordinal) {
            Some(kernels) => Arc::clone(kernels),
            None => {
                let kernels = Arc::new(Kernels::new(Gpu::new(ordinal)?));
                loaded.insert(ordinal, Arc::clone(&kernels));
                kernels
            }
        };
        Ok(Self {
            device,
            kernels,
            stream: current_stream(ordinal)?,
        })
    }

    /// Bytes from torch's allocator, which gives them to other work of the stream only after this
    /// one's.
    fn bytes(&self, count: usize) -> Result<Tensor, TchError> {
        Tensor::f_empty([count as i64], (Kind::Uint8, self.device))
    }

    fn build_schedule(
        &self,
        plan: &ForwardPlan,
        cu_seqlens: &Tensor,
    ) -> Result<Tensor, GpuCallError> {
        let schedule = self.bytes(plan.schedule_layout().bytes)?;
        let (boundaries, buffer) = (address(cu_seqlens), address(&schedule));
        // SAFETY: kernels are never unloaded; the boundaries are as many as the plan's, the buffer is
        // of its size, and torch's allocator keeps both for this stream's work.
        unsafe {
            self.kernels
                .build_schedule(self.stream, plan, boundaries, buffer)?
        };
        Ok(schedule)
    }

    /// O and LSE; the codes are left in `scratch`, which holds as many bytes as the plan takes.
    fn forward(
        &self,
        plan: &ForwardPlan,
        [q, k, v]: [&Tensor; 3],
        scheduled: &Scheduled,
        scratch: &Tensor,
    ) -> Result<(Tensor, Tensor), GpuCallError> {
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            let found = (tensor.kind(), tensor.device());
            if found != (Kind::BFloat16, self.device) || tensor.dim() != 3 {
                return Err(GpuCallError::Operand {
                    tensor: name,
                    found: format!(
                        "{:?} of shape {:?} on {:?}",
                        found.0,
                        tensor.size(),
                        found.1
                    ),
                    device: self.device,
                });
            }
        }
        let CallShape { tokens, heads, .. } = *plan.shape();
        let o = Tensor::f_empty(q.size(), (Kind::BFloat16, self.device))?;
        let lse = Tensor::f_empty([heads as i64, tokens as i64], (Kind::Float, self.device))?;
        let tensors = CallTensors {
            q: device_tensor("q", q),
            k: device_tensor("k", k),
            v: device_tensor("v", v),
            o: device_tensor("o", &o),
            lse: address(&lse),
            cu_seqlens: address(&scheduled.boundaries),
        };
        let schedule = address(&scheduled.schedule);
        // SAFETY: as in `build_schedule`; the schedule is the plan's, and calls that share one are
        // given to one stream.
        unsafe { plan.launch(self.stream, &tensors, schedule, place(scratch))? };
        Ok((o, lse))
    }

    /// Fills dQ, dK and dV.
    fn backward(
        &self,
        plan: &TrainingPlan,
        [o, lse, d_o]: [&Tensor; 3],
        [dq, dk, dv]: &[Tensor; 3],
        scheduled: &Scheduled,
        codes: &Tensor,
    ) -> Result<(), GpuCallError> {
        let scratch = self.bytes(plan.scratch_bytes())?;
        let tensors = BackwardTensors {
            o: device_tensor("o", &readable_rows(o)?),
            lse: address(lse),
            d_o: device_tensor("d_o", d_o),
            dq: device_tensor("dq", dq),
            dk: device_tensor("dk", dk),
            dv: device_tensor("dv", dv),
            cu_seqlens: address(&scheduled.boundaries),
        };
        let schedule = address(&scheduled.schedule);
        // SAFETY: as in `forward`, whose codes and schedule these are; torch runs a node's backward pass
        // on the stream of its forward pass.
        unsafe {
            plan.backward(
                self.stream,
                &tensors,
                schedule,
                place(codes),
                place(&scratch),
            )?
        };
        Ok(())
    }
}

/// The bytes of a tensor, as scratch.
fn place(tensor: &Tensor) -> Scratch {
    Scratch {
        address: address(tensor),
        bytes: tensor.numel(),
    }
}
