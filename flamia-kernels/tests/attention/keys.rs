//! One call of the kernel of dK and dV on a GPU.

use flamia_cuda::{Buffer, Gpu, Graph, Stream};
use flamia_kernels::cuda::backward_keys::{
    BackwardKeys, BackwardKeysCall, BackwardKeysConfig, BackwardKeysError, BackwardWork,
};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::Quantised;
use flamia_sched::work::HeadSections;

use super::gradients::{Backward, Canaried};
use super::{Shape, schedule};

/// How the kernel goes about it, which must not show.
#[derive(Clone, Copy, Debug)]
pub struct KeysWay {
    pub kv_heads_per_section: usize,
}

impl KeysWay {
    pub const ALL: [Self; 2] = [
        Self {
            kv_heads_per_section: usize::MAX,
        },
        Self {
            kv_heads_per_section: 1,
        },
    ];
}

/// dK and dV.
#[derive(Clone)]
pub struct KeyGradients {
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl KeyGradients {
    pub fn bits(&self) -> Vec<u64> {
        let all = self.dk.iter().chain(&self.dv);
        all.map(|x| x.to_bits()).collect()
    }
}

/// A call with all that it needs in device memory.
pub struct KeysDevice<'a> {
    backward: &'a Backward,
    kernel: BackwardKeys,
    operands: [(Buffer<u8>, Quantised); 4],
    dk: Canaried,
    dv: Canaried,
    schedule: [Buffer<u8>; 2],
    counter: Buffer<u32>,
    sections: HeadSections,
}

impl<'a> KeysDevice<'a> {
    pub fn new(gpu: &Gpu, backward: &'a Backward, way: KeysWay) -> Self {
        let problem = &backward.problem;
        let Shape {
            kv_heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let config = BackwardKeysConfig {
            head_dim,
            mask,
            rotated: head_dim == HeadDim::D128,
        };
        let kernel = BackwardKeys::new(gpu, config).unwrap_or_else(|error| panic!("{error}"));
        let shape = [problem.tokens(), kv_heads, head_dim.get()];
        let number = |n: usize| std::num::NonZero::new(n).unwrap();
        Self {
            operands: backward.operands(gpu),
            dk: Canaried::new(gpu, "dK", shape),
            dv: Canaried::new(gpu, "dV", shape),
            schedule: schedule(gpu, &config.tiling(), &problem.documents, false),
            counter: Buffer::filled(gpu, 1, 0).unwrap(),
            sections: HeadSections::new(number(kv_heads), number(way.kv_heads_per_section)),
            kernel,
            backward,
        }
    }

    pub fn config(&self) -> &BackwardKeysConfig {
        self.kernel.config()
    }

    pub fn call(&self) -> BackwardKeysCall {
        let problem = &self.backward.problem;
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        BackwardKeysCall {
            q,
            k,
            v,
            d_o,
            heads: problem.shape.heads,
            dk: self.dk.tensor,
            dv: self.dv.tensor,
            documents: problem.documents.len(),
            work: BackwardWork {
                header: self.schedule[0].pointer(),
                items: self.schedule[1].pointer(),
            },
            sections: self.sections,
            counter: self.counter.pointer(),
            scale: 1.0 / (problem.shape.head_dim.get() as f64).sqrt(),
            hysteresis: 3,
        }
    }

    pub fn launch(&self, stream: Stream<'_>) -> Result<(), BackwardKeysError> {
        // SAFETY: every buffer is this value's, made for the call, and read back before it goes.
        unsafe { self.kernel.launch(stream, &self.call()) }
    }

    /// The launch as a graph.
    pub fn capture(&self, gpu: &Gpu, stream: Stream<'_>) -> Graph {
        // SAFETY: the stream is the GPU's and idle; callers keep this value beyond the last replay.
        unsafe { Graph::capture(gpu, stream, |stream| self.launch(stream)) }
            .unwrap_or_else(|error: BackwardKeysError| panic!("{error}"))
    }

    /// Poisons the gradients again.
    pub fn forget(&mut self) {
        self.dk.forget();
        self.dv.forget();
    }

    pub fn gradients(&self) -> Result<KeyGradients, String> {
        let (dk, dv) = (self.dk.values()?, self.dv.values()?);
        if self.counter.download().unwrap() != [0] {
            return Err("the counter was not left at zero".to_owned());
        }
        Ok(KeyGradients { dk, dv })
    }
}

impl Backward {
    /// The kernel's result, and what else it wrote as an error.
    pub fn keys_on_gpu(&self, gpu: &Gpu, way: KeysWay) -> Result<KeyGradients, String> {
        let device = KeysDevice::new(gpu, self, way);
        let stream = gpu.context().new_stream().unwrap();
        device.launch((&*stream).into()).unwrap();
        device.gradients()
    }
}
