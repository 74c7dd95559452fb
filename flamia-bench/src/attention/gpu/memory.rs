//! What a training call occupies, by the statistics of torch's allocator.
//!
//! It hands out all memory of all systems here: ours takes its workspace from the caller, who is torch.
//! What no allocator sees, kernels' code and the driver's own, is in nobody's figures.

use flamia_autograd::TorchMemory;
use flamia_autograd::peers::{Peer, PeerCall, PeerError};
use flamia_cuda::Stream;
use flamia_kernels::BackwardForm;
use flamia_kernels::cuda::call::{CallError, SavedImages};
use tch::{Kind, Tensor};

use super::error::GpuBenchError;
use super::flamia::{backward_tensors, place, tensors};
use super::libtorch::tell;
use super::operands::{Device, address};
use super::{OURS, Session};
use crate::attention::memory::{LONG, Measured, Occupied};
use crate::attention::row::{Masking, Precision, Setting};
use crate::attention::way::Way;
use crate::attention::{Attention, Entrant};

/// The calls that were asked for, causal, on [`LONG`].
pub fn run(settings: &Attention) -> Result<(Vec<Measured>, Setting), GpuBenchError> {
    let session = Session::open(settings.gpu)?;
    let device = &session.device;
    let mut measured = Vec::new();
    session.run(|stream| {
        // There are no statistics before the first tensor.
        drop(Tensor::f_zeros([1], (Kind::Float, device.torch))?);
        if settings.system.contains(&Entrant::Flamia) {
            let as_it_is = Way::default();
            let both = Way {
                images: SavedImages::Both,
                ..as_it_is
            };
            let two_kernels = Way {
                backward: BackwardForm::TwoKernel,
                ..as_it_is
            };
            // The rule picks one kernel for documents of this length, which takes more for itself.
            for (name, way) in [
                (OURS.to_owned(), as_it_is),
                (format!("{OURS}, both images saved"), both),
                (format!("{OURS}, two-kernel backward"), two_kernels),
            ] {
                // Once before, so that what is allocated at a first call and kept is there.
                match ours(device, way, stream).and_then(|_| ours(device, way, stream)) {
                    Err(GpuBenchError::Call(error @ CallError::Unsupported { .. })) => {
                        tell(LONG.name, Masking::Causal, &error);
                        break;
                    }
                    occupied => measured.push((name, Precision::Mxfp8, occupied?)),
                }
            }
        }
        for peer in settings.system.iter().filter_map(|entrant| entrant.peer()) {
            match theirs(device, peer).and_then(|_| theirs(device, peer)) {
                Err(GpuBenchError::Peer(PeerError::Lengths { .. })) => {}
                Err(GpuBenchError::Peer(error)) => tell(LONG.name, Masking::Causal, &error),
                occupied => measured.push((peer.to_string(), Precision::Bf16, occupied?)),
            }
        }
        Ok(())
    })?;
    if measured.is_empty() {
        return Err(GpuBenchError::Nobody);
    }
    Ok((measured, session.setting))
}

/// What tensors occupy.
fn bytes_of(tensors: &[&Tensor]) -> u64 {
    let size = |x: &&Tensor| (x.numel() * x.kind().elt_size_in_bytes()) as u64;
    tensors.iter().map(size).sum()
}

/// Q, K and V of [`LONG`], and its boundaries.
struct Row {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
}

impl Row {
    fn draw(device: &Device) -> Result<Self, GpuBenchError> {
        let documents = LONG.documents();
        let normal = |heads: usize| {
            let size = [documents.total(), heads, LONG.head_dim].map(|n| n as i64);
            Tensor::f_randn(size, (Kind::BFloat16, device.torch))
        };
        Ok(Self {
            q: normal(LONG.heads)?,
            k: normal(LONG.kv_heads)?,
            v: normal(LONG.kv_heads)?,
            cu_seqlens: Tensor::f_from_slice(documents.cu_seqlens())?.f_to_device(device.torch)?,
        })
    }

    fn operand_bytes(&self) -> u64 {
        bytes_of(&[&self.q, &self.k, &self.v])
    }
}

/// Our call, with everything allocated when autograd allocates it.
fn ours(device: &Device, way: Way, stream: Stream<'_>) -> Result<Occupied, GpuBenchError> {
    let bytes = |count: usize| Tensor::f_empty([count as i64], (Kind::Uint8, device.torch));
    let shape = LONG.of_call();
    let plan = device.kernels.tuned_training_plan(
        shape,
        &way.options(Masking::Causal),
        way.images,
        way.tuning,
    )?;
    let start = TorchMemory::of(device.ordinal)?.now;
    let row = Row::draw(device)?;
    TorchMemory::reset(device.ordinal)?;
    let schedule = bytes(plan.forward().schedule_layout().bytes)?;
    let saved = bytes(plan.saved_bytes())?;
    let o = row.q.f_empty_like()?;
    let lse = [shape.heads, shape.tokens].map(|n| n as i64);
    let lse = Tensor::f_empty(lse, (Kind::Float, device.torch))?;
    let call = tensors([&row.q, &row.k, &row.v, &o], &lse, &row.cu_seqlens)?;
    // SAFETY: the memory is this GPU's, as large as the plan says, and given back to the stream's work alone;
    // the kernels outlive the session, and the boundaries are those of packed documents.
    unsafe {
        let at = address(&schedule);
        device
            .kernels
            .build_schedule(stream, plan.forward(), call.cu_seqlens, at)?;
        plan.forward().launch(stream, &call, at, place(&saved))?;
    }
    let forward = TorchMemory::of(device.ordinal)?.peak - start;
    let operands = row.operand_bytes();
    let sizes = [&row.q, &row.k, &row.v].map(Tensor::size);
    let Row {
        q,
        k,
        v,
        cu_seqlens,
    } = row;
    // The backward pass reads codes instead.
    drop([q, k, v]);
    let held = TorchMemory::reset(device.ordinal)?.now - start;

    let d_o = o.f_randn_like()?;
    let scratch = bytes(plan.scratch_bytes())?;
    let empty = |size: &Vec<i64>| Tensor::f_empty(&size[..], (o.kind(), device.torch));
    let gradients = [empty(&sizes[0])?, empty(&sizes[1])?, empty(&sizes[2])?];
    let call = backward_tensors([&o, &lse, &d_o], &gradients, &cu_seqlens)?;
    // SAFETY: as above.
    unsafe {
        let at = address(&schedule);
        plan.backward(stream, &call, at, place(&saved), place(&scratch))?;
    }
    let backward = TorchMemory::of(device.ordinal)?.peak - start;
    device.kernels.gpu().synchronize()?;
    let [dq, dk, dv] = &gradients;
    Ok(Occupied {
        operands,
        gradients: bytes_of(&[&d_o, dq, dk, dv]),
        forward,
        held,
        backward,
    })
}

/// A peer's call, which reads Q, K and V in both passes.
fn theirs(device: &Device, peer: Peer) -> Result<Occupied, GpuBenchError> {
    let start = TorchMemory::of(device.ordinal)?.now;
    let row = Row::draw(device)?;
    let Row {
        q,
        k,
        v,
        cu_seqlens,
    } = &row;
    let call = PeerCall {
        q,
        k,
        v,
        cu_seqlens,
        longest: LONG.documents().longest() as i64,
        is_causal: true,
        scale: 1.0 / (LONG.head_dim as f64).sqrt(),
    };
    TorchMemory::reset(device.ordinal)?;
    let results = peer.forward(&call)?;
    let TorchMemory { now, peak } = TorchMemory::of(device.ordinal)?;
    let (forward, held) = (peak - start, now - start);
    let d_o = q.f_randn_like()?;
    TorchMemory::reset(device.ordinal)?;
    let gradients = peer.backward(&call, &results, &d_o)?;
    let backward = TorchMemory::of(device.ordinal)?.peak - start;
    device.kernels.gpu().synchronize()?;
    Ok(Occupied {
        operands: row.operand_bytes(),
        gradients: bytes_of(&[&d_o, &gradients.dq, &gradients.dk, &gradients.dv]),
        forward,
        held,
        backward,
    })
}
