//! Whole calls on a GPU, schedule and quantisers included, against the CPU's `hopper` profile.

mod attention;
mod common;
mod quantised;
mod whole_call;

use attention::{Outputs, Problem, Shape};
use common::cosine;
use flamia_cuda::Graph;
use flamia_kernels::cuda::call::CallShape;
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Options, Path, Profile};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use whole_call::{Call, POISON, bits, boundaries, kernels, options};

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
            buffer.upload(bits(data)).unwrap();
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
            call.o_buffer
                .download()
                .unwrap()
                .iter()
                .all(|&x| x == POISON),
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
