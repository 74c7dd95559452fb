//! Tensors on a GPU that are not contiguous, and batches: no bit differs from the same rows packed.

mod attention;
mod common;
mod quantised;
mod whole_call;

use attention::{Problem, Shape};
use common::cosine;
use flamia_cuda::Buffer;
use flamia_kernels::cpu;
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::tensor::DeviceTensor;
use flamia_kernels::{Mask, MmaAccumulator, TensorView};
use flamia_sched::Documents;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use whole_call::{Call, POISON, Raw, bits, kernels, options};

fn problem(lengths: Vec<usize>, head_dim: HeadDim, mask: Mask) -> Problem {
    let shape = Shape {
        lengths,
        heads: 4,
        kv_heads: 2,
        head_dim,
        mask,
    };
    Problem::gaussian(shape, &mut ChaCha8Rng::seed_from_u64(8))
}

/// How an operand lies in a buffer of its own that is NaN everywhere else, strides in elements.
struct Place {
    first: usize,
    token: usize,
    head: usize,
}

/// `[tokens, heads, dims]` values at a place of poison.
fn placed(values: &[bf16], [heads, dims]: [usize; 2], place: &Place) -> Vec<u16> {
    let rows = values.len() / dims;
    let start = |row: usize| place.first + row / heads * place.token + row % heads * place.head;
    let end = (0..rows).map(start).max().unwrap_or_default() + dims;
    let mut memory = vec![POISON; end + 64];
    for (row, values) in values.chunks(dims).enumerate() {
        memory[start(row)..][..dims].copy_from_slice(bits(values));
    }
    memory
}

/// Inputs and output as views with gaps, all heads of a token side by side or all tokens of a head.
#[test]
#[ignore = "needs a GPU"]
fn views_with_gaps_give_the_bits_of_contiguous_tensors() {
    let kernels = kernels();
    let gpu = kernels.gpu();
    for (head_dim, mask) in [
        (HeadDim::D128, Mask::Causal),
        (HeadDim::D64, Mask::Full),
        (HeadDim::D128, Mask::window(70)),
    ] {
        let problem = problem(vec![200, 0, 1, 333, 64], head_dim, mask);
        let (tokens, dims) = (problem.tokens(), head_dim.get());
        let contiguous = Call::new(&kernels, &problem, problem.documents.len() + 1);
        contiguous.run(&kernels);
        let wanted = contiguous.raw();
        assert!(wanted.is_whole());
        for is_head_major in [false, true] {
            // Other heads before and after, or other tokens.
            let place = |heads: usize| match is_head_major {
                false => Place {
                    first: 2 * dims,
                    token: (heads + 3) * dims,
                    head: dims,
                },
                true => Place {
                    first: 5 * dims,
                    token: dims + 8,
                    head: (tokens + 9) * (dims + 8),
                },
            };
            let mut call = Call::new(&kernels, &problem, problem.documents.len() + 1);
            let view = |tensor: DeviceTensor, values: &[bf16]| {
                let heads = tensor.shape[1];
                let place = place(heads);
                let memory = placed(values, [heads, dims], &place);
                let buffer = Buffer::from_slice(gpu, &memory).unwrap();
                let tensor = DeviceTensor {
                    address: buffer.pointer() + (place.first * size_of::<bf16>()) as u64,
                    strides: [place.token, place.head, 1],
                    ..tensor
                };
                (buffer, tensor)
            };
            let (q, q_tensor) = view(call.q, &problem.q);
            let (k, k_tensor) = view(call.k, &problem.k);
            let (v, v_tensor) = view(call.v, &problem.v);
            let nothing = vec![bf16::from_bits(POISON); problem.q.len()];
            let (o, o_tensor) = view(call.o, &nothing);
            call.operands = vec![q, k, v];
            (call.q, call.k, call.v, call.o) = (q_tensor, k_tensor, v_tensor, o_tensor);
            call.o_buffer = o;
            call.run(&kernels);

            // All of O's memory: its rows where they belong, and poison around them.
            let found = call.raw();
            let o: Vec<_> = wanted.o.iter().map(|x| bf16::from_bits(*x)).collect();
            let wanted = Raw {
                o: placed(&o, [problem.shape.heads, dims], &place(problem.shape.heads)),
                lse: wanted.lse.clone(),
            };
            assert!(
                found.is_bitwise(&wanted),
                "{head_dim:?} {mask}, head-major {is_head_major}"
            );
        }
    }
}

/// Documents of equal length against the CPU's batched call.
#[test]
#[ignore = "needs a GPU"]
fn batches_match_the_cpu() {
    let kernels = kernels();
    for (batch, len, mask) in [
        (5, 333, Mask::Causal),
        (3, 256, Mask::Full),
        (8, 130, Mask::window(60)),
    ] {
        let problem = problem(vec![len; batch], HeadDim::D128, mask);
        let documents = Documents::batched(batch, len).unwrap();
        assert_eq!(documents.cu_seqlens(), problem.documents.cu_seqlens());
        let call = Call::new(&kernels, &problem, batch + 1);
        call.run(&kernels);
        let found = call.outputs();

        let shape = |heads| [batch, len, heads, 128];
        let view = |name, x, heads: usize| {
            let strides = [len * heads * 128, heads * 128, 128, 1];
            TensorView::new(name, x, shape(heads), strides).unwrap()
        };
        let (q, k, v) = (
            view("q", &problem.q[..], 4),
            view("k", &problem.k[..], 2),
            view("v", &problem.v[..], 2),
        );
        let mut options = options(mask);
        options.accumulator = MmaAccumulator::Hopper;
        let wanted = cpu::forward(&q, &k, &v, &documents, &options, None).unwrap();
        let o: Vec<_> = wanted.o.iter().map(|x| x.to_f64()).collect();
        let similarity = cosine(&found.o, &o);
        println!("{batch} x {len} {mask}: {similarity}");
        assert!(similarity > 0.99999, "{similarity}");
        for (found, wanted) in found.lse.iter().zip(&wanted.lse) {
            let wanted = f64::from(*wanted);
            assert!((found - wanted).abs() < 1e-4, "{found} {wanted}");
        }
    }
}
