//! One call of the kernel of dQ on a GPU.

use flamia_cuda::{Buffer, Gpu, Graph, Stream};
use flamia_kernels::cuda::backward_keys::BackwardWork;
use flamia_kernels::cuda::backward_queries::{
    BackwardQueries, BackwardQueriesCall, BackwardQueriesConfig, BackwardQueriesError,
};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::Quantised;
use flamia_sched::work::HeadSections;

use super::gradients::{Backward, Canaried};
use super::{Shape, schedule};

/// How the kernel goes about it, which must not show.
#[derive(Clone, Copy, Debug)]
pub struct QueriesWay {
    pub heads_per_section: usize,
}

impl QueriesWay {
    pub const ALL: [Self; 2] = [
        Self {
            heads_per_section: usize::MAX,
        },
        Self {
            heads_per_section: 1,
        },
    ];
}

/// A call with all that it needs in device memory.
pub struct QueriesDevice<'a> {
    backward: &'a Backward,
    kernel: BackwardQueries,
    operands: [(Buffer<u8>, Quantised); 4],
    dq: Canaried,
    schedule: [Buffer<u8>; 2],
    counter: Buffer<u32>,
    sections: HeadSections,
}

impl<'a> QueriesDevice<'a> {
    pub fn new(gpu: &Gpu, backward: &'a Backward, way: QueriesWay) -> Self {
        let problem = &backward.problem;
        let Shape {
            heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let config = BackwardQueriesConfig {
            head_dim,
            mask,
            rotated: head_dim == HeadDim::D128,
        };
        let kernel = BackwardQueries::new(gpu, config).unwrap_or_else(|error| panic!("{error}"));
        let shape = [problem.tokens(), heads, head_dim.get()];
        let number = |n: usize| std::num::NonZero::new(n).unwrap();
        Self {
            operands: backward.operands(gpu),
            dq: Canaried::new(gpu, "dQ", shape),
            schedule: schedule(gpu, &config.tiling(), &problem.documents, false),
            counter: Buffer::filled(gpu, 1, 0).unwrap(),
            sections: HeadSections::new(number(heads), number(way.heads_per_section)),
            kernel,
            backward,
        }
    }

    pub fn launch(&self, stream: Stream<'_>) -> Result<(), BackwardQueriesError> {
        let problem = &self.backward.problem;
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        let call = BackwardQueriesCall {
            q,
            k,
            v,
            d_o,
            kv_heads: problem.shape.kv_heads,
            dq: self.dq.tensor,
            documents: problem.documents.len(),
            work: BackwardWork {
                header: self.schedule[0].pointer(),
                items: self.schedule[1].pointer(),
            },
            sections: self.sections,
            counter: self.counter.pointer(),
            scale: 1.0 / (problem.shape.head_dim.get() as f64).sqrt(),
            hysteresis: 3,
        };
        // SAFETY: every buffer is this value's, made for the call, and read back before it goes.
        unsafe { self.kernel.launch(stream, &call) }
    }

    /// The launch as a graph.
    pub fn capture(&self, gpu: &Gpu, stream: Stream<'_>) -> Graph {
        // SAFETY: the stream is the GPU's and idle; callers keep this value beyond the last replay.
        unsafe { Graph::capture(gpu, stream, |stream| self.launch(stream)) }
            .unwrap_or_else(|error: BackwardQueriesError| panic!("{error}"))
    }

    /// Poisons dQ again.
    pub fn forget(&mut self) {
        self.dq.forget();
    }

    pub fn dq(&self) -> Result<Vec<f64>, String> {
        let dq = self.dq.values()?;
        if self.counter.download().unwrap() != [0] {
            return Err("the counter was not left at zero".to_owned());
        }
        Ok(dq)
    }
}

impl Backward {
    /// The kernel's dQ, and what else it wrote as an error.
    pub fn queries_on_gpu(&self, gpu: &Gpu, way: QueriesWay) -> Result<Vec<f64>, String> {
        let device = QueriesDevice::new(gpu, self, way);
        let stream = gpu.context().new_stream().unwrap();
        device.launch((&*stream).into()).unwrap();
        device.dq()
    }
}
