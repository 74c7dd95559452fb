//! The attention that comes with torch.

use std::error::Error;

use flamia_autograd::TorchMemory;
use flamia_autograd::peers::{Peer, PeerCall, PeerForward, PeerGradients};
use flamia_cuda::Stream;
use flamia_kernels::cuda::call::FormChoice;
use tch::Tensor;

use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::operands::{Device, Operands};
use crate::attention::row::{Masking, Memory, Pass, Precision, System};

/// One of torch's attentions, after a first call.
pub struct Libtorch<'a> {
    peer: Peer,
    operands: &'a Operands,
    mask: Masking,
    /// With a head for each query head.
    k: Tensor,
    v: Tensor,
    /// What the backward reads.
    pub forward: PeerForward,
    /// Missing where torch refuses.
    pub gradients: Option<PeerGradients>,
    memory: Memory,
}

impl<'a> Libtorch<'a> {
    /// Runs both passes. A backward that torch refuses is told on standard error and left out.
    ///
    /// # Errors
    /// A forward that torch refuses.
    pub fn new(
        device: &Device,
        peer: Peer,
        operands: &'a Operands,
        mask: Masking,
    ) -> Result<Self, GpuBenchError> {
        let group = (operands.shape.heads / operands.shape.kv_heads) as i64;
        let repeated = |x: &Tensor| match group {
            1 => Ok(x.shallow_clone()),
            _ => x.f_repeat_interleave_self_int(group, 1, None),
        };
        let (k, v) = (repeated(&operands.k)?, repeated(&operands.v)?);
        let call = call(operands, &k, &v, mask);
        let before = TorchMemory::reset(device.ordinal)?.now;
        let forward = peer.forward(&call)?;
        let peak = TorchMemory::of(device.ordinal)?.peak - before;
        let results = operands.q.numel() * operands.q.kind().elt_size_in_bytes()
            + operands.documents.total() * operands.shape.heads * size_of::<f32>();
        let gradients = match peer.backward(&call, &forward, &operands.d_o) {
            Ok(gradients) => Some(gradients),
            Err(error) => {
                tell(operands.shape.name, mask, &error);
                None
            }
        };
        Ok(Self {
            peer,
            operands,
            mask,
            k,
            v,
            forward,
            gradients,
            memory: Memory {
                peak: peak.saturating_sub(results as u64),
                layouts: None,
            },
        })
    }

    fn peer_call(&self) -> PeerCall<'_> {
        call(self.operands, &self.k, &self.v, self.mask)
    }
}

fn call<'a>(operands: &'a Operands, k: &'a Tensor, v: &'a Tensor, mask: Masking) -> PeerCall<'a> {
    PeerCall {
        q: &operands.q,
        k,
        v,
        cu_seqlens: &operands.cu_seqlens,
        longest: operands.documents.longest() as i64,
        is_causal: mask == Masking::Causal,
        scale: operands.scale(),
    }
}

/// Says why a system is missing from the table.
pub fn tell(workload: &str, mask: Masking, error: &dyn Error) {
    let text = error.to_string();
    // torch's texts go on with lists of kernels and frames.
    let first = text.lines().next().unwrap_or_default();
    eprintln!("left out on {workload}, {mask}: {first}");
}

impl Contestant for Libtorch<'_> {
    fn system(&self) -> System {
        System {
            name: self.peer.to_string(),
            precision: Precision::Bf16,
            is_ours: false,
        }
    }

    fn calls(&self) -> Vec<Call> {
        let passes: &[Pass] = match self.gradients {
            Some(_) => &[Pass::Fwd, Pass::Bwd, Pass::Train],
            None => &[Pass::Fwd],
        };
        let call = |&pass| Call {
            pass,
            quantisation: None,
        };
        passes.iter().map(call).collect()
    }

    fn launch(&self, call: Call, _: Stream<'_>) -> Result<(), GpuBenchError> {
        let (peer, d_o) = (self.peer, &self.operands.d_o);
        let peer_call = self.peer_call();
        match call.pass {
            Pass::Fwd => drop(peer.forward(&peer_call)?),
            Pass::Bwd => drop(peer.backward(&peer_call, &self.forward, d_o)?),
            Pass::Train => {
                let forward = peer.forward(&peer_call)?;
                drop(peer.backward(&peer_call, &forward, d_o)?);
            }
        }
        Ok(())
    }

    fn memory(&self, call: Call) -> Option<Memory> {
        (call.pass == Pass::Fwd).then_some(self.memory)
    }

    fn note(&self) -> &'static str {
        if self.operands.shape.heads == self.operands.shape.kv_heads {
            ""
        } else {
            "K and V repeated"
        }
    }

    fn form(&self, _: Call) -> Option<FormChoice> {
        None
    }
}
