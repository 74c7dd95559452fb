//! One call of the kernel of all three gradients on a GPU.

use flamia_cuda::{Buffer, Gpu, Graph, Stream};
use flamia_kernels::cuda::backward_fused::{
    BackwardFused, BackwardFusedCall, BackwardFusedConfig, BackwardFusedError, DqSums,
};
use flamia_kernels::cuda::tensor::Scratch;

use super::POISON;
use super::gradients::{Backward, Canaried, Gradients};
use super::keys::{KeysDevice, KeysWay};

/// A call with all that it needs in device memory.
pub struct FusedDevice<'a> {
    keys: KeysDevice<'a>,
    kernel: BackwardFused,
    dq: Canaried,
    cu_seqlens: Buffer<i32>,
    scratch: Buffer<u8>,
}

impl<'a> FusedDevice<'a> {
    pub fn new(gpu: &Gpu, backward: &'a Backward, way: KeysWay, sums: DqSums) -> Self {
        let problem = &backward.problem;
        let shape = &problem.shape;
        let keys = KeysDevice::new(gpu, backward, way);
        let config = BackwardFusedConfig {
            keys: *keys.config(),
            sums,
        };
        let documents = problem.documents.len();
        let scratch = config
            .scratch(problem.tokens(), documents, shape.heads, shape.kv_heads)
            .unwrap();
        Self {
            kernel: BackwardFused::new(gpu, config).unwrap_or_else(|error| panic!("{error}")),
            dq: Canaried::new(
                gpu,
                "dQ",
                [problem.tokens(), shape.heads, shape.head_dim.get()],
            ),
            cu_seqlens: Buffer::from_slice(gpu, problem.documents.cu_seqlens()).unwrap(),
            scratch: Buffer::filled(gpu, scratch.bytes(), POISON).unwrap(),
            keys,
        }
    }

    pub fn launch(&self, stream: Stream<'_>) -> Result<(), BackwardFusedError> {
        let call = BackwardFusedCall {
            keys: self.keys.call(),
            dq: self.dq.tensor,
            cu_seqlens: self.cu_seqlens.pointer(),
            scratch: Scratch {
                address: self.scratch.pointer(),
                bytes: self.scratch.len(),
            },
        };
        // SAFETY: every buffer is this value's, made for the call, and read back before it goes.
        unsafe { self.kernel.launch(stream, &call) }
    }

    /// The launches as a graph.
    pub fn capture(&self, gpu: &Gpu, stream: Stream<'_>) -> Graph {
        // SAFETY: the stream is the GPU's and idle; callers keep this value beyond the last replay.
        unsafe { Graph::capture(gpu, stream, |stream| self.launch(stream)) }
            .unwrap_or_else(|error: BackwardFusedError| panic!("{error}"))
    }

    /// Poisons the gradients again.
    pub fn forget(&mut self) {
        self.keys.forget();
        self.dq.forget();
    }

    pub fn gradients(&self) -> Result<Gradients, String> {
        let keys = self.keys.gradients()?;
        Ok(Gradients {
            dq: self.dq.values()?,
            dk: keys.dk,
            dv: keys.dv,
        })
    }
}

impl Backward {
    /// The kernel's result, and what else it wrote as an error.
    pub fn fused_on_gpu(&self, gpu: &Gpu, way: KeysWay, sums: DqSums) -> Result<Gradients, String> {
        let device = FusedDevice::new(gpu, self, way, sums);
        let stream = gpu.context().new_stream().unwrap();
        device.launch((&*stream).into()).unwrap();
        device.gradients()
    }
}
