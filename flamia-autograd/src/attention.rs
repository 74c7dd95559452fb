//! Low-bit attention on packed documents as an operation of torch's graph.

use std::borrow::Cow;
use std::sync::Arc;

use flamia_kernels::{Backend, Element, Options, Path, Stats, TensorView, cpu};
use flamia_sched::Documents;
use half::bf16;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::FunctionError;
use crate::function::{BackwardContext, ForwardContext, Function, apply, builds_graph};
use crate::gpu::{GpuAttention, GpuCallError};

/// Why a call of [`attention`] was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A shape, head count, document boundary or option that does not fit.
    #[error(transparent)]
    Call(#[from] flamia_kernels::AttentionError),

    /// A tensor of the wrong rank.
    #[error(
        "{tensor} has shape {shape:?}: expected [rows, heads, head_dim] or [batch, length, heads, head_dim]"
    )]
    Rank {
        /// Which tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<i64>,
    },

    /// An element type without a kernel.
    #[error("q is {found:?}: use Float, BFloat16 or, to check gradients, Double")]
    Kind {
        /// Kind of q.
        found: Kind,
    },

    /// Tensors that differ where they must not.
    #[error("{tensor} is {found}, but q is {expected}: bring them to one kind and device")]
    Mismatch {
        /// Which tensor.
        tensor: &'static str,
        /// Kind and device of q.
        expected: String,
        /// Kind and device of the tensor.
        found: String,
    },

    /// Documents of another packed row.
    #[error("q has {rows} rows, but the documents have {documents}: they belong to different rows")]
    Rows {
        /// Rows of q, over the whole batch.
        rows: i64,
        /// Rows of the documents.
        documents: usize,
    },

    /// A call that the GPU's kernels refuse.
    #[error("{0}\n  To have the host compute it, slowly: backend = host")]
    Gpu(Box<GpuCallError>),

    /// A failure inside the graph.
    #[error(transparent)]
    Function(#[from] FunctionError),
}

/// Attention of packed documents, differentiable in `q`, `k` and `v`.
///
/// `q` is `[rows, heads, head_dim]` or `[batch, length, heads, head_dim]`, with any strides; `k`
/// and `v` have `kv_heads` instead, of which `heads` is a multiple. `documents` cover
/// `batch * length` rows. The result has the shape, kind and device of `q`. A kind of `Float` does
/// not make a low-bit path wider: its results hold BF16 values.
///
/// What rounding did is added to `stats` in both passes.
///
/// Exponentials that are for inference only are refused when an input requires a gradient, unless
/// gradients are off (`tch::no_grad`).
///
/// Tensors on a GPU are computed by its kernels, in BF16 and with `Profile::Auto` as the GPU
/// multiplies: `mxfp8` on Hopper, head dimension 64 or 128. Saved for the backward pass are the 8-bit codes
/// of `q`, `k` and `v`, O and its log-sum-exp; `stats` stay as they are. Gradients are the same bits in every
/// run with `BackwardForm::TwoKernel`; left at `Auto`, those of all but short documents come from one kernel,
/// whose dQ is added up in no fixed order. What there is no kernel for is
/// refused, unless `Backend::Host` asks for the reference backend on the host, with copies: correct, and
/// slow. The path `reference` is always the host's.
///
/// # Errors
/// See [`AttentionError`]; nothing is computed then. A second derivative (`create_graph`) is
/// refused by the backward pass. NaN is not an error: it poisons its block of 32 tokens and what
/// reads it, as [`flamia_kernels::cpu::forward`] says.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: &Documents,
    options: &Options,
    stats: Option<&Arc<Stats>>,
) -> Result<Tensor, AttentionError> {
    let describe = |x: &Tensor| format!("{:?} on {:?}", x.kind(), x.device());
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        if !matches!(tensor.dim(), 3 | 4) || tensor.dim() != q.dim() {
            return Err(AttentionError::Rank {
                tensor: name,
                shape: tensor.size(),
            });
        }
        if (tensor.kind(), tensor.device()) != (q.kind(), q.device()) {
            return Err(AttentionError::Mismatch {
                tensor: name,
                expected: describe(q),
                found: describe(tensor),
            });
        }
    }
    let inputs = [Some(q), Some(k), Some(v)];
    let kind = q.kind();
    if let Device::Cuda(_) = q.device()
        && options.backend == Backend::Auto
        && options.path != Path::Reference
    {
        // Its plan checks the options, with the profile that `Profile::Auto` is there.
        return attention_on_gpu([q, k, v], documents, options, stats);
    }
    // The kernels' own check, at every call, cannot know that this one will be differentiated.
    if builds_graph(&inputs) {
        options.validate_training(q.size().last().map_or(0, |&head_dim| head_dim as usize))?;
    }
    let call = Call::new(documents, options, stats);
    let outputs = match kind {
        Kind::Float => apply(Attention::<f32>::new(call), &inputs),
        Kind::Double => apply(Attention::<f64>::new(call), &inputs),
        Kind::BFloat16 => apply(Attention::<bf16>::new(call), &inputs),
        found => return Err(AttentionError::Kind { found }),
    };
    only(outputs)
}

/// The GPU's kernels, which read BF16: gradients come back in the kind of the tensors.
fn attention_on_gpu(
    inputs: [&Tensor; 3],
    documents: &Documents,
    options: &Options,
    stats: Option<&Arc<Stats>>,
) -> Result<Tensor, AttentionError> {
    let kind = inputs[0].kind();
    if !matches!(kind, Kind::Float | Kind::BFloat16) {
        return Err(AttentionError::Kind { found: kind });
    }
    let rows: i64 = inputs[0].size().iter().rev().skip(2).product();
    if rows != documents.total() as i64 {
        return Err(AttentionError::Rows {
            rows,
            documents: documents.total(),
        });
    }
    let narrow = |tensor: &Tensor| {
        tensor
            .f_to_kind(Kind::BFloat16)
            .map_err(FunctionError::from)
    };
    let [q, k, v] = inputs;
    let (q, k, v) = (narrow(q)?, narrow(k)?, narrow(v)?);
    let call = Call::new(documents, options, stats);
    let o = only(apply(
        GpuAttention::new(call),
        &[Some(&q), Some(&k), Some(&v)],
    ))?;
    Ok(o.f_to_kind(kind).map_err(FunctionError::from)?)
}

/// The one output, or why there is none: a refused call comes through the graph in a box.
fn only(outputs: Result<Vec<Tensor>, FunctionError>) -> Result<Tensor, AttentionError> {
    let error = match outputs {
        Ok(mut outputs) => return Ok(outputs.swap_remove(0)),
        Err(FunctionError::Custom(error)) => error,
        Err(error) => return Err(error.into()),
    };
    let error = match error.downcast::<flamia_kernels::AttentionError>() {
        Ok(error) => return Err(AttentionError::Call(*error)),
        Err(error) => error,
    };
    Err(match error.downcast::<GpuCallError>() {
        Ok(error) => AttentionError::Gpu(error),
        Err(error) => FunctionError::Custom(error).into(),
    })
}

/// Everything about a call but its tensors.
pub(crate) struct Call {
    pub documents: Documents,
    pub options: Options,
    pub stats: Option<Arc<Stats>>,
}

impl Call {
    fn new(documents: &Documents, options: &Options, stats: Option<&Arc<Stats>>) -> Self {
        Self {
            documents: documents.clone(),
            options: *options,
            stats: stats.cloned(),
        }
    }

    /// The name of the graph's node.
    pub fn name(&self) -> Cow<'static, str> {
        format!("{} attention", self.options.path).into()
    }
}

/// An element type that tch and the kernels both know.
trait Scalar: Element {
    /// The elements of a flat tensor on the host.
    fn read(tensor: &Tensor) -> Result<Vec<Self>, TchError>;
    /// A flat tensor on the host.
    fn write(data: &[Self]) -> Result<Tensor, TchError>;
}

macro_rules! scalar {
    ($($type:ty),+) => {$(
        impl Scalar for $type {
            fn read(tensor: &Tensor) -> Result<Vec<Self>, TchError> {
                Vec::try_from(tensor)
            }
            fn write(data: &[Self]) -> Result<Tensor, TchError> {
                Tensor::f_from_slice(data)
            }
        }
    )+};
}

scalar!(f32, f64);

/// tch 0.24 takes `half::bf16` for torch's Half, so BF16 crosses as bits.
impl Scalar for bf16 {
    fn read(tensor: &Tensor) -> Result<Vec<Self>, TchError> {
        let bits: Vec<i16> = Vec::try_from(&tensor.f_view_dtype(Kind::Int16)?)?;
        Ok(bits
            .into_iter()
            .map(|bits| Self::from_bits(bits as u16))
            .collect())
    }
    fn write(data: &[Self]) -> Result<Tensor, TchError> {
        let bits: Vec<i16> = data.iter().map(|x| x.to_bits() as i16).collect();
        Tensor::f_from_slice(&bits)?.f_view_dtype(Kind::BFloat16)
    }
}

/// The operation; what its backward needs besides q, k, v and o, which torch keeps.
struct Attention<E: Element> {
    call: Call,
    lse: Vec<E::Real>,
}

impl<E: Element> Attention<E> {
    fn new(call: Call) -> Self {
        Self {
            call,
            lse: Vec::new(),
        }
    }
}

/// A tensor's elements in a contiguous buffer on the host.
struct Host<E> {
    data: Vec<E>,
    /// `[batch, length, heads, head_dim]`.
    shape: [usize; 4],
}

impl<E: Scalar> Host<E> {
    fn read(tensor: &Tensor) -> Result<Self, TchError> {
        let mut shape = [1; 4];
        let size = tensor.size();
        for (to, from) in shape[4 - size.len()..].iter_mut().zip(&size) {
            *to = *from as usize;
        }
        let flat = tensor
            .detach()
            .f_to_device(Device::Cpu)?
            .f_contiguous()?
            .f_reshape([-1])?;
        Ok(Self {
            data: E::read(&flat)?,
            shape,
        })
    }

    fn view(&self, name: &'static str) -> Result<TensorView<'_, E>, FunctionError> {
        let [_, length, heads, head_dim] = self.shape;
        let row = heads * head_dim;
        TensorView::new(
            name,
            &self.data,
            self.shape,
            [length * row, row, head_dim, 1],
        )
        .map_err(FunctionError::custom)
    }
}

/// A result in the shape and on the device of `like`.
fn write<E: Scalar>(data: &[E], like: &Tensor) -> Result<Tensor, TchError> {
    E::write(data)?
        .f_reshape(like.size())?
        .f_to_device(like.device())
}

impl<E: Scalar> Function for Attention<E> {
    fn name(&self) -> Cow<'static, str> {
        self.call.name()
    }

    fn forward(
        &mut self,
        ctx: &mut ForwardContext,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, FunctionError> {
        let [q, k, v] = [0, 1, 2].map(|i| inputs[i].expect("attention passes q, k and v"));
        let [host_q, host_k, host_v] = [q, k, v].map(Host::<E>::read);
        let (host_q, host_k, host_v) = (host_q?, host_k?, host_v?);
        let forward = cpu::forward(
            &host_q.view("q")?,
            &host_k.view("k")?,
            &host_v.view("v")?,
            &self.call.documents,
            &self.call.options,
            self.call.stats.as_deref(),
        )
        .map_err(FunctionError::custom)?;
        self.lse = forward.lse;
        let o = write(&forward.o, q)?;
        ctx.save_for_backward(&[q, k, v, &o]);
        Ok(vec![o])
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
        let [q, k, v, o] = [0, 1, 2, 3].map(|i| &ctx.saved()[i]);
        let d_o = d_o.f_to_kind(q.kind())?;
        let read = Host::<E>::read;
        let (host_q, host_k, host_v) = (read(q)?, read(k)?, read(v)?);
        let (host_o, host_d_o) = (read(o)?, read(&d_o)?);
        let gradients = cpu::backward(
            &host_q.view("q")?,
            &host_k.view("k")?,
            &host_v.view("v")?,
            &host_o.view("o")?,
            &self.lse,
            &host_d_o.view("d_o")?,
            &self.call.documents,
            &self.call.options,
            self.call.stats.as_deref(),
        )
        .map_err(FunctionError::custom)?;
        Ok(vec![
            Some(write(&gradients.dq, q)?),
            Some(write(&gradients.dk, k)?),
            Some(write(&gradients.dv, v)?),
        ])
    }
}

/// What backward passes of attention begin with.
pub(crate) fn refuse_second_derivative(ctx: &BackwardContext) -> Result<(), FunctionError> {
    if ctx.grad_enabled() {
        return Err(FunctionError::custom(
            "attention has no second derivative: call backward without create_graph",
        ));
    }
    Ok(())
}
