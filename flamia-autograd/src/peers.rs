//! The BF16 attention that torch itself has on GPUs, to compare with: flash attention on packed
//! documents, and cuDNN's on batches of equal lengths and on packed documents.
//!
//! tch has none of the forwards. A call goes to torch's current stream, see
//! [`TorchStream`](crate::TorchStream), and can be captured.

use std::ffi::{c_char, c_int};
use std::fmt;

use tch::{TchError, Tensor};
use torch_sys::C_tensor;

use crate::error::FunctionError;
use crate::ffi::{check_torch_version, take_text};

/// One of torch's attentions, in the order of `FlamiaPeer`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// `aten::_flash_attention_forward`: FlashAttention 2, packed documents.
    Flash,
    /// `aten::_scaled_dot_product_cudnn_attention`: documents of one length.
    Cudnn,
    /// `aten::_cudnn_attention_forward`: packed documents.
    CudnnPacked,
}

impl Peer {
    /// All of them.
    pub const ALL: [Peer; 3] = [Peer::Flash, Peer::Cudnn, Peer::CudnnPacked];
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Peer::Flash => "libtorch FA2 varlen",
            Peer::Cudnn => "libtorch cuDNN batched",
            Peer::CudnnPacked => "libtorch cuDNN packed",
        })
    }
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// A tensor somewhere else.
    #[error("{peer} runs on an NVIDIA GPU alone, and {tensor} is on {device:?}: move it there")]
    Device {
        /// The attention.
        peer: Peer,
        /// Which tensor.
        tensor: &'static str,
        /// Where it is.
        device: tch::Device,
    },
    /// Documents of several lengths.
    #[error(
        "{peer} takes documents of one length, and {rows} rows are not {documents} times {longest}: \
         use the packed attention"
    )]
    Lengths {
        /// The attention.
        peer: Peer,
        /// Rows of the packed row.
        rows: i64,
        /// Documents in it.
        documents: i64,
        /// Rows of the longest document.
        longest: i64,
    },
    /// K and V with fewer heads than Q.
    #[error(
        "{peer} is asked for {heads} query heads on {kv_heads} key/value heads: repeat K and V, as \
         the comparison does, with `repeat_interleave`"
    )]
    Heads {
        /// The attention.
        peer: Peer,
        /// Query heads.
        heads: i64,
        /// Key/value heads.
        kv_heads: i64,
    },
    /// torch refuses the call.
    #[error("{peer} refuses its {pass}: {message}")]
    Refused {
        /// The attention.
        peer: Peer,
        /// `forward` or `backward`.
        pass: &'static str,
        /// torch's words.
        message: String,
    },
    /// A tensor operation around the call failed.
    #[error(transparent)]
    Torch(#[from] TchError),
    /// Another libtorch than the one this was compiled for.
    #[error(transparent)]
    Version(#[from] FunctionError),
}

/// Operands and settings of a call, BF16 on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct PeerCall<'a> {
    /// `[rows, heads, head_dim]`, contiguous.
    pub q: &'a Tensor,
    /// As Q, with its heads.
    pub k: &'a Tensor,
    /// As K.
    pub v: &'a Tensor,
    /// `[documents + 1]`, `i32`.
    pub cu_seqlens: &'a Tensor,
    /// Rows of the longest document.
    pub longest: i64,
    /// Whether a query sees no key behind it.
    pub is_causal: bool,
    /// Softmax scale.
    pub scale: f64,
}

/// What a forward gives, and its backward reads.
#[derive(Debug)]
pub struct PeerForward {
    /// `[rows, heads, head_dim]`; a view.
    pub o: Tensor,
    /// Output, log-sum-exp, seed and offset, as the attention gave them.
    pub(crate) results: [Tensor; 4],
}

/// `[rows, heads, head_dim]` each; views.
#[derive(Debug)]
pub struct PeerGradients {
    /// Of Q.
    pub dq: Tensor,
    /// Of K.
    pub dk: Tensor,
    /// Of V.
    pub dv: Tensor,
}

#[repr(C)]
struct RawCall {
    q: *const C_tensor,
    k: *const C_tensor,
    v: *const C_tensor,
    cu_seqlens: *const C_tensor,
    longest: i64,
    is_causal: bool,
    scale: f64,
}

unsafe extern "C" {
    fn flamia_peer_forward(
        peer: c_int,
        call: *const RawCall,
        results: *const *mut C_tensor,
    ) -> *mut c_char;
    fn flamia_peer_backward(
        peer: c_int,
        call: *const RawCall,
        results: *const *const C_tensor,
        grad_output: *const C_tensor,
        grads: *const *mut C_tensor,
    ) -> *mut c_char;
}

impl Peer {
    /// Output and log-sum-exp.
    ///
    /// # Errors
    /// What this attention does not take, and what torch does not.
    pub fn forward(self, call: &PeerCall<'_>) -> Result<PeerForward, PeerError> {
        self.check(call)?;
        let shaped = self.shaped(call)?;
        let results = self.raw_forward(&shaped.raw(call))?;
        let o = self.packed(&results[0], call)?;
        Ok(PeerForward { o, results })
    }

    /// Gradients of Q, K and V from that of the output, `d_o`, `[rows, heads, head_dim]`.
    ///
    /// # Errors
    /// As [`Peer::forward`].
    pub fn backward(
        self,
        call: &PeerCall<'_>,
        forward: &PeerForward,
        d_o: &Tensor,
    ) -> Result<PeerGradients, PeerError> {
        self.check(call)?;
        let shaped = self.shaped(call)?;
        let d_o = self.shape(d_o, call.longest)?;
        let [dq, dk, dv] = self.raw_backward(&shaped.raw(call), &forward.results, &d_o)?;
        Ok(PeerGradients {
            dq: self.packed(&dq, call)?,
            dk: self.packed(&dk, call)?,
            dv: self.packed(&dv, call)?,
        })
    }

    fn check(self, call: &PeerCall<'_>) -> Result<(), PeerError> {
        check_torch_version()?;
        let tensors = [
            ("q", call.q),
            ("k", call.k),
            ("v", call.v),
            ("cu_seqlens", call.cu_seqlens),
        ];
        for (tensor, value) in tensors {
            let device = value.device();
            if !device.is_cuda() {
                return Err(PeerError::Device {
                    peer: self,
                    tensor,
                    device,
                });
            }
        }
        let (rows, heads, _) = call.q.size3()?;
        let (_, kv_heads, _) = call.k.size3()?;
        if heads != kv_heads {
            return Err(PeerError::Heads {
                peer: self,
                heads,
                kv_heads,
            });
        }
        let documents = call.cu_seqlens.size1()? - 1;
        if self == Peer::Cudnn && documents * call.longest != rows {
            return Err(PeerError::Lengths {
                peer: self,
                rows,
                documents,
                longest: call.longest,
            });
        }
        Ok(())
    }

    fn shaped(self, call: &PeerCall<'_>) -> Result<Shaped, TchError> {
        let shape = |tensor| self.shape(tensor, call.longest);
        Ok(Shaped([shape(call.q)?, shape(call.k)?, shape(call.v)?]))
    }

    /// A packed tensor as this attention wants it; a view.
    fn shape(self, tensor: &Tensor, longest: i64) -> Result<Tensor, TchError> {
        match self {
            Peer::Flash | Peer::CudnnPacked => Ok(tensor.shallow_clone()),
            Peer::Cudnn => {
                let (_, heads, head_dim) = tensor.size3()?;
                tensor
                    .f_view([-1, longest, heads, head_dim])?
                    .f_transpose(1, 2)
            }
        }
    }

    /// The reverse of `shape`. Results lie as operands do, so that it is a view as well.
    fn packed(self, tensor: &Tensor, call: &PeerCall<'_>) -> Result<Tensor, TchError> {
        match self {
            Peer::Flash | Peer::CudnnPacked => Ok(tensor.shallow_clone()),
            Peer::Cudnn => tensor.f_transpose(1, 2)?.f_reshape(call.q.size()),
        }
    }

    fn raw_forward(self, call: &RawCall) -> Result<[Tensor; 4], PeerError> {
        let mut results = [(); 4].map(|()| Tensor::new());
        let pointers = results.each_mut().map(Tensor::as_mut_ptr);
        // SAFETY: the call's tensors outlive the call, there are as many results as the shim fills,
        // each borrowed exclusively, and the text is ours.
        let refusal =
            unsafe { take_text(flamia_peer_forward(self as c_int, call, pointers.as_ptr())) };
        self.answered("forward", refusal)?;
        Ok(results)
    }

    fn raw_backward(
        self,
        call: &RawCall,
        results: &[Tensor; 4],
        d_o: &Tensor,
    ) -> Result<[Tensor; 3], PeerError> {
        let results = results.each_ref().map(Tensor::as_ptr);
        let mut grads = [(); 3].map(|()| Tensor::new());
        let pointers = grads.each_mut().map(Tensor::as_mut_ptr);
        // SAFETY: as in `raw_forward`.
        let refusal = unsafe {
            take_text(flamia_peer_backward(
                self as c_int,
                call,
                results.as_ptr(),
                d_o.as_ptr(),
                pointers.as_ptr(),
            ))
        };
        self.answered("backward", refusal)?;
        Ok(grads)
    }

    fn answered(self, pass: &'static str, refusal: Option<String>) -> Result<(), PeerError> {
        match refusal {
            None => Ok(()),
            Some(message) => Err(PeerError::Refused {
                peer: self,
                pass,
                message,
            }),
        }
    }
}

/// Q, K and V as an attention wants them.
struct Shaped([Tensor; 3]);

impl Shaped {
    /// Borrows this value and the call's boundaries.
    fn raw(&self, call: &PeerCall<'_>) -> RawCall {
        let [q, k, v] = self.0.each_ref().map(Tensor::as_ptr);
        RawCall {
            q,
            k,
            v,
            cu_seqlens: call.cu_seqlens.as_ptr(),
            longest: call.longest,
            is_causal: call.is_causal,
            scale: call.scale,
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// Two documents of 8 rows on the CPU, and a call of them.
    fn with_call<R>(test: impl FnOnce(&PeerCall<'_>) -> R) -> R {
        let x = Tensor::randn([16, 2, 64], (Kind::BFloat16, Device::Cpu));
        let cu_seqlens = Tensor::from_slice(&[0i32, 8, 16]);
        test(&PeerCall {
            q: &x,
            k: &x,
            v: &x,
            cu_seqlens: &cu_seqlens,
            longest: 8,
            is_causal: true,
            scale: 0.125,
        })
    }

    #[test]
    fn tensors_on_the_cpu_are_refused_by_name() {
        for peer in Peer::ALL {
            let error = with_call(|call| peer.forward(call)).unwrap_err();
            assert!(matches!(error, PeerError::Device { tensor: "q", .. }));
            let told = error.to_string();
            assert!(
                told.contains(&peer.to_string()) && told.contains("Cpu"),
                "{told}"
            );
        }
    }

    /// What torch says when its CUDA part is asked in vain arrives as an error, past the shim.
    #[test]
    fn an_exception_becomes_an_error() {
        for peer in Peer::ALL {
            with_call(|call| {
                let shaped = peer.shaped(call).unwrap();
                let error = peer.raw_forward(&shaped.raw(call)).unwrap_err();
                let told = error.to_string();
                assert!(
                    told.starts_with(&format!("{peer} refuses its forward: ")),
                    "{told}"
                );
                assert!(told.contains("attention"), "{told}");
                let results = [(); 4].map(|()| call.q.shallow_clone());
                let d_o = peer.shape(call.q, call.longest).unwrap();
                let error = peer.raw_backward(&shaped.raw(call), &results, &d_o);
                let error = error.unwrap_err();
                assert!(
                    matches!(
                        error,
                        PeerError::Refused {
                            pass: "backward",
                            ..
                        }
                    ),
                    "{error}"
                );
            });
        }
    }

    #[test]
    fn batches_are_views_there_and_back() {
        with_call(|call| {
            let batch = Peer::Cudnn.shape(call.q, call.longest).unwrap();
            assert_eq!(batch.size(), [2, 2, 8, 64]);
            assert_eq!(batch.data_ptr(), call.q.data_ptr());
            // Head 1 of row 3 of document 1 is head 1 of packed row 11.
            let row = batch.get(1).get(1).get(3);
            assert_eq!(row, call.q.get(11).get(1));
            let packed = Peer::Cudnn.packed(&batch, call).unwrap();
            assert_eq!(packed, *call.q);
            assert_eq!(packed.data_ptr(), call.q.data_ptr());
        });
    }
}
