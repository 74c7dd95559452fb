//! Whole calls on a GPU, schedule and quantisers included, against the CPU's `hopper` profile.

mod attention;
mod common;
mod quantised;

use attention::{Outputs, Problem, Shape};
use common::cosine;
use flamia_cuda::{Buffer, Gpu, Graph};
use flamia_kernels::cuda::call::{CallError, CallShape, CallTensors, ForwardPlan, Kernels};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_kernels::{Mask, Options, Path, Profile};
use flamia_sched::Documents;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn options(mask: Mask) -> Options {
    let mut options = Options::new(Path::Mxfp8, mask);
    options.profile = Profile::Hopper;
    options
}

fn call_shape(problem: &Problem, entries: usize) -> CallShape {
    CallShape {
        documents: entries - 1,
        ..CallShape::of(
            &problem.documents,
            problem.shape.heads,
            problem.shape.kv_heads,
            problem.shape.head_dim.get(),
        )
    }
}

/// Everything of one call in device memory.
struct Call {
    plan: ForwardPlan,
    operands: [Buffer<u16>; 3],
    o: Buffer<u16>,
    lse: Buffer<f32>,
    cu_seqlens: Buffer<i32>,
    schedule: Buffer<u8>,
    scratch: Buffer<u8>,
}

fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|x| x.to_bits()).collect()
}

impl Call {
    /// With room for `entries` boundaries, all of them past the documents' own the last one again.
    fn new(kernels: &Kernels, problem: &Problem, entries: usize) -> Self {
        let gpu = kernels.gpu();
        let shape = call_shape(problem, entries);
        let plan = kernels
            .plan(shape, &options(problem.shape.mask))
            .unwrap_or_else(|error| panic!("{error}"));
        let rows = shape.tokens * shape.heads;
        Self {
            operands: [&problem.q, &problem.k, &problem.v]
                .map(|data| Buffer::from_slice(gpu, &bits(data)).unwrap()),
            o: Buffer::filled(gpu, rows * shape.head_dim, 0xff).unwrap(),
            lse: Buffer::filled(gpu, rows, 0xff).unwrap(),
            cu_seqlens: Buffer::from_slice(gpu, &boundaries(&problem.documents, entries)).unwrap(),
            schedule: Buffer::filled(gpu, plan.schedule_layout().bytes, 0xff).unwrap(),
            scratch: Buffer::filled(gpu, plan.scratch_bytes(), 0xff).unwrap(),
            plan,
        }
    }

    fn give(&self, kernels: &Kernels, stream: flamia_cuda::Stream<'_>) -> Result<(), CallError> {
        let CallShape {
            tokens,
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.plan.shape();
        let [q, k, v] = &self.operands;
        let tensor = |name, buffer: &Buffer<u16>, heads| {
            DeviceTensor::packed(name, buffer.pointer(), [tokens, heads, head_dim])
        };
        let tensors = CallTensors {
            q: tensor("q", q, heads),
            k: tensor("k", k, kv_heads),
            v: tensor("v", v, kv_heads),
            o: tensor("o", &self.o, heads),
            lse: self.lse.pointer(),
            cu_seqlens: self.cu_seqlens.pointer(),
        };
        let scratch = Scratch {
            address: self.scratch.pointer(),
            bytes: self.scratch.len(),
        };
        let (cu_seqlens, schedule) = (self.cu_seqlens.pointer(), self.schedule.pointer());
        // SAFETY: all buffers are of the plan's sizes and outlive the download, which waits.
        unsafe {
            kernels.build_schedule(stream, &self.plan, cu_seqlens, schedule)?;
            self.plan.launch(stream, &tensors, schedule, scratch)
        }
    }

    fn outputs(&self) -> Outputs {
        let o = self.o.download().unwrap();
        let lse = self.lse.download().unwrap();
        Outputs {
            o: o.into_iter().map(|x| bf16::from_bits(x).to_f64()).collect(),
            lse: lse.into_iter().map(f64::from).collect(),
        }
    }
}

fn boundaries(documents: &Documents, entries: usize) -> Vec<i32> {
    let mut cu_seqlens = documents.cu_seqlens().to_vec();
    cu_seqlens.resize(entries, documents.total() as i32);
    cu_seqlens
}

/// Close to the CPU's `hopper` profile.
fn check(found: &Outputs, problem: &Problem) {
    let wanted = problem.on_cpu(Path::Mxfp8);
    let case = &problem.shape;
    assert_eq!(found.o.len(), wanted.o.len());
    if wanted.o.is_empty() {
        return;
    }
    let similarity = cosine(&found.o, &wanted.o);
    assert!(similarity > 0.99999, "{similarity} {case:?}");
    for (found, wanted) in found.lse.iter().zip(&wanted.lse) {
        let close = (found - wanted).abs() < 1e-4;
        assert!(close || found == wanted, "{found} {wanted} {case:?}");
    }
}

fn gaussian(lengths: Vec<usize>, mask: Mask, seed: u64) -> Problem {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let kv_heads = [1, 2, 3][rng.random_range(0..3)];
    let shape = Shape {
        lengths,
        heads: kv_heads * [1, 2, 4][rng.random_range(0..3)],
        kv_heads,
        head_dim: [HeadDim::D128, HeadDim::D64][rng.random_range(0..2)],
        mask,
    };
    Problem::gaussian(shape, &mut rng)
}

fn kernels() -> Kernels {
    Kernels::new(Gpu::new(0).unwrap_or_else(|error| panic!("{error}")))
}

#[test]
#[ignore = "needs a GPU"]
fn random_packed_rows_match_the_cpu() {
    let kernels = kernels();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for case in 0..60 {
        let mask = [
            Mask::Causal,
            Mask::Full,
            Mask::window(rng.random_range(1..400)),
        ][case % 3];
        let length = |rng: &mut ChaCha8Rng| match rng.random_range(0..4) {
            0 => rng.random_range(0..3),
            1 => [
                31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257,
            ][rng.random_range(0..14)],
            2 => rng.random_range(1..300),
            _ => rng.random_range(1..900),
        };
        let lengths = (0..rng.random_range(1..9))
            .map(|_| length(&mut rng))
            .collect();
        let problem = gaussian(lengths, mask, case as u64);
        let call = Call::new(&kernels, &problem, problem.documents.len() + 1);
        let stream = kernels.gpu().context().new_stream().unwrap();
        call.give(&kernels, (&*stream).into()).unwrap();
        check(&call.outputs(), &problem);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_serves_other_documents_of_the_same_length() {
    let kernels = kernels();
    let gpu = kernels.gpu();
    let (total, entries) = (3000, 40);
    let first = gaussian(vec![total], Mask::Causal, 3);
    let mut call = Call::new(&kernels, &first, entries);
    let stream = gpu.context().new_stream().unwrap();
    // SAFETY: the call's buffers and kernels outlive the replays.
    let mut graph = unsafe {
        Graph::capture(gpu, (&*stream).into(), |stream| {
            call.give(&kernels, stream)
                .map_err(|error| panic!("{error}"))
        })
        .unwrap_or_else(|error: flamia_cuda::GpuError| panic!("{error}"))
    };
    for lengths in [
        vec![total],
        vec![1000; 3],
        vec![1, 0, 2100, 899],
        vec![75; 39 + 1][..39].to_vec(),
    ] {
        let mut lengths = lengths;
        let rest = total - lengths.iter().sum::<usize>();
        if let Some(last) = lengths.last_mut() {
            *last += rest;
        }
        let mut shape = first.shape.clone();
        shape.lengths = lengths;
        let problem = Problem::gaussian(shape, &mut ChaCha8Rng::seed_from_u64(rest as u64));
        for (buffer, data) in call
            .operands
            .iter_mut()
            .zip([&problem.q, &problem.k, &problem.v])
        {
            buffer.upload(&bits(data)).unwrap();
        }
        call.cu_seqlens
            .upload(&boundaries(&problem.documents, entries))
            .unwrap();
        graph.replay((&*stream).into()).unwrap();
        let replayed = call.outputs();
        check(&replayed, &problem);

        let eager = Call::new(&kernels, &problem, problem.documents.len() + 1);
        eager.give(&kernels, (&*stream).into()).unwrap();
        assert!(
            replayed.bits() == eager.outputs().bits(),
            "graph and launches agree bit for bit"
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn unsound_boundaries_compute_nothing_and_touch_nothing() {
    let kernels = kernels();
    let problem = gaussian(vec![100, 200, 300], Mask::Causal, 11);
    let stream = kernels.gpu().context().new_stream().unwrap();
    for bad in [
        [0, 100, 90, 600],
        [-5, 100, 300, 600],
        [0, 100, 300, 1 << 30],
        [0, i32::MIN, i32::MAX, 600],
    ] {
        let mut call = Call::new(&kernels, &problem, 4);
        call.cu_seqlens.upload(&bad).unwrap();
        call.give(&kernels, (&*stream).into()).unwrap();
        assert!(
            call.o.download().unwrap().iter().all(|&x| x == 0xffff),
            "{bad:?}"
        );
        call.cu_seqlens
            .upload(&boundaries(&problem.documents, 4))
            .unwrap();
        call.give(&kernels, (&*stream).into()).unwrap();
        check(&call.outputs(), &problem);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_only_the_reference_computes_is_refused() {
    let kernels = kernels();
    let shape = CallShape {
        tokens: 10,
        documents: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: 128,
    };
    let refusal = |shape, options| match kernels.plan(shape, &options) {
        Ok(_) => panic!("{options:?}"),
        Err(error) => error.to_string(),
    };
    let path = refusal(shape, Options::new(Path::Nvfp4, Mask::Causal));
    assert!(
        path.contains("path `nvfp4`") && path.contains("sm_90a"),
        "{path}"
    );
    let mut blackwell = options(Mask::Causal);
    blackwell.profile = Profile::BlockScaled;
    let profile = refusal(shape, blackwell);
    assert!(profile.contains("profile `block-scaled`"), "{profile}");
    let wide = CallShape {
        head_dim: 96,
        ..shape
    };
    let head_dim = refusal(wide, options(Mask::Causal));
    assert!(head_dim.contains("head dimension 96"), "{head_dim}");
}
