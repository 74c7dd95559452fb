//! torch's FlashAttention 2 of packed documents as an operation of torch's graph.

use std::borrow::Cow;

use flamia_sched::Documents;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::FunctionError;
use crate::function::{BackwardContext, ForwardContext, Function, apply};
use crate::peers::{Peer, PeerCall, PeerError, PeerForward};

/// Why a call of [`flash_attention`] was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlashError {
    /// Tensors that are not packed.
    #[error("{tensor} has shape {shape:?}: expected [rows, heads, head_dim]")]
    Rank {
        /// Which tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<i64>,
    },

    /// Heads that cannot be shared.
    #[error("{heads} query heads cannot share {kv_heads} key/value heads evenly")]
    Heads {
        /// Query heads.
        heads: i64,
        /// Key/value heads.
        kv_heads: i64,
    },

    /// Documents of another packed row.
    #[error("q has {rows} rows, but the documents have {documents}: they belong to different rows")]
    Rows {
        /// Rows of q.
        rows: i64,
        /// Rows of the documents.
        documents: i64,
    },

    /// Tensors on no GPU, or what torch refuses.
    #[error(transparent)]
    Peer(#[from] PeerError),

    /// A failure inside the graph.
    #[error(transparent)]
    Function(FunctionError),

    /// An operation around the call.
    #[error(transparent)]
    Torch(#[from] TchError),
}

/// Where documents end, on the device that reads it. All layers of a model share one.
#[derive(Debug)]
pub struct FlashDocuments {
    documents: Documents,
    device: Device,
    /// `[documents + 1]`, Int, the empty documents left out.
    cu_seqlens: Tensor,
    longest: i64,
}

impl FlashDocuments {
    /// Brings the boundaries of `documents` to `device`. The host waits for nothing.
    ///
    /// # Errors
    /// When torch cannot allocate or copy.
    pub fn new(documents: &Documents, device: Device) -> Result<Self, TchError> {
        let mut boundaries = documents.cu_seqlens().to_vec();
        boundaries.dedup();
        let host = Tensor::f_from_slice(&boundaries)?;
        let cu_seqlens = match device {
            Device::Cuda(_) => {
                let (kind, non_blocking, copy) = (host.kind(), true, false);
                host.f_pin_memory(device)?
                    .f_to_device_(device, kind, non_blocking, copy)?
            }
            _ => host,
        };
        Ok(Self {
            documents: documents.clone(),
            device,
            cu_seqlens,
            longest: documents.longest() as i64,
        })
    }

    /// Whether these are the boundaries of `documents` on `device`.
    pub fn is_of(&self, documents: &Documents, device: Device) -> bool {
        self.device == device && self.documents == *documents
    }
}

/// Causal attention of packed documents by torch's FlashAttention 2, differentiable in `q`, `k` and
/// `v`.
///
/// `q` is `[rows, heads, head_dim]`; `k` and `v` have `kv_heads` instead, of which `heads` is a
/// multiple. All lie on one NVIDIA GPU, contiguous in their last dimension. It computes in BF16; the
/// result and the gradients have the kind of `q`.
///
/// # Errors
/// See [`FlashError`]; nothing is computed then.
pub fn flash_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: &FlashDocuments,
) -> Result<Tensor, FlashError> {
    for (tensor, x) in [("q", q), ("k", k), ("v", v)] {
        if x.dim() != 3 {
            return Err(FlashError::Rank {
                tensor,
                shape: x.size(),
            });
        }
    }
    let (rows, heads, head_dim) = q.size3()?;
    let total = documents.documents.total() as i64;
    if rows != total {
        return Err(FlashError::Rows {
            rows,
            documents: total,
        });
    }
    let kv_heads = k.size()[1];
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(FlashError::Heads { heads, kv_heads });
    }
    // Every query head reads its own copy of K and V, as where this attention is measured. The
    // gradient sums the copies again.
    let for_every_head = |x: &Tensor| -> Result<Tensor, TchError> {
        let x = x.f_to_kind(Kind::BFloat16)?;
        match heads / kv_heads {
            1 => Ok(x),
            group => x
                .f_unsqueeze(2)?
                .f_expand([rows, kv_heads, group, head_dim], false)?
                .f_reshape([rows, heads, head_dim]),
        }
    };
    let (q_bf16, k, v) = (
        q.f_to_kind(Kind::BFloat16)?,
        for_every_head(k)?,
        for_every_head(v)?,
    );
    let call = Flash {
        cu_seqlens: documents.cu_seqlens.shallow_clone(),
        longest: documents.longest,
        scale: 1.0 / (head_dim as f64).sqrt(),
    };
    let outputs = apply(call, &[Some(&q_bf16), Some(&k), Some(&v)]);
    let mut outputs = outputs.map_err(|error| match error {
        FunctionError::Custom(error) => match error.downcast::<PeerError>() {
            Ok(error) => FlashError::Peer(*error),
            Err(error) => FlashError::Function(FunctionError::Custom(error)),
        },
        error => FlashError::Function(error),
    })?;
    Ok(outputs.swap_remove(0).f_to_kind(q.kind())?)
}

/// Everything about a call but its operands.
struct Flash {
    cu_seqlens: Tensor,
    longest: i64,
    scale: f64,
}

impl Flash {
    fn call<'a>(&'a self, q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> PeerCall<'a> {
        PeerCall {
            q,
            k,
            v,
            cu_seqlens: &self.cu_seqlens,
            longest: self.longest,
            is_causal: true,
            scale: self.scale,
        }
    }
}

impl Function for Flash {
    fn name(&self) -> Cow<'static, str> {
        "flash attention".into()
    }

    fn forward(
        &mut self,
        ctx: &mut ForwardContext,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, FunctionError> {
        let [q, k, v] = [0, 1, 2].map(|i| inputs[i].expect("flash_attention passes q, k and v"));
        let forward = Peer::Flash
            .forward(&self.call(q, k, v))
            .map_err(FunctionError::custom)?;
        let [o, lse, seed, offset] = &forward.results;
        ctx.save_for_backward(&[q, k, v, o, lse, seed, offset]);
        Ok(vec![forward.o])
    }

    fn backward(
        &self,
        ctx: &BackwardContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>, FunctionError> {
        if ctx.grad_enabled() {
            return Err(FunctionError::custom(
                "flash attention has no second derivative: call backward without create_graph",
            ));
        }
        let Some(d_o) = &grads[0] else {
            return Ok(vec![None, None, None]);
        };
        let [q, k, v, o, lse, seed, offset] = [0, 1, 2, 3, 4, 5, 6].map(|i| &ctx.saved()[i]);
        let forward = PeerForward {
            o: o.shallow_clone(),
            results: [o, lse, seed, offset].map(Tensor::shallow_clone),
        };
        let gradients = Peer::Flash
            .backward(&self.call(q, k, v), &forward, &d_o.f_contiguous()?)
            .map_err(FunctionError::custom)?;
        Ok(vec![
            Some(gradients.dq),
            Some(gradients.dk),
            Some(gradients.dv),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operands(rows: i64, heads: [i64; 2]) -> [Tensor; 3] {
        [heads[0], heads[1], heads[1]]
            .map(|heads| Tensor::randn([rows, heads, 64], (Kind::Float, Device::Cpu)))
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_runs() {
        let documents = Documents::from_lengths(&[5, 0, 3]).unwrap();
        let documents = FlashDocuments::new(&documents, Device::Cpu).unwrap();
        let told = |[q, k, v]: [Tensor; 3]| {
            let error = flash_attention(&q, &k, &v, &documents).unwrap_err();
            error.to_string()
        };
        assert!(told(operands(9, [2, 2])).contains("9 rows, but the documents have 8"));
        assert!(told(operands(8, [3, 2])).contains("3 query heads cannot share 2"));
        assert!(told(operands(8, [2, 2]).map(|x| x.unsqueeze(0))).contains("q has shape [1, 8"));
        // Everything fits, but there is no GPU here.
        let cpu = told(operands(8, [4, 2]));
        assert!(
            cpu.contains("NVIDIA GPU alone") && cpu.contains("Cpu"),
            "{cpu}"
        );
    }

    #[test]
    fn boundaries_leave_empty_documents_out() {
        let documents = Documents::from_lengths(&[5, 0, 3, 0]).unwrap();
        let there = FlashDocuments::new(&documents, Device::Cpu).unwrap();
        assert_eq!(there.cu_seqlens, Tensor::from_slice(&[0i32, 5, 8]));
        assert_eq!(there.longest, 5);
        assert!(there.is_of(&documents, Device::Cpu));
        assert!(!there.is_of(&documents, Device::Cuda(0)));
        let other = Documents::from_lengths(&[5, 3]).unwrap();
        assert!(!there.is_of(&other, Device::Cpu));
    }
}
