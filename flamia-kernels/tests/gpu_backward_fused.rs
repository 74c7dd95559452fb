//! The kernel of all three gradients: its variants compile without a GPU; on one it gives the CPU's
//! numbers. `cargo test --features cuda -- --ignored` on a machine that has a Hopper GPU, and NVRTC.

mod attention;
mod compiled;
mod quantised;

use attention::check::{Failures, distance};
use attention::fused::FusedDevice;
use attention::gradients::{Backward, Gradients};
use attention::keys::KeysWay;
use attention::random::{random_problems, random_shape};
use attention::{HEAD_DIMS, Problem, Shape, gpu, masks};
use flamia_cuda::Gpu;
use flamia_kernels::cuda::backward_fused::{self, BackwardFusedConfig, DqSums};
use flamia_kernels::cuda::backward_keys::BackwardKeysConfig;
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{BackwardForm, DqAccumulator, Mask, Options, Path};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

#[test]
fn every_variant_compiles_without_spills() {
    for head_dim in HEAD_DIMS {
        for rotated in [false, true] {
            for sums in DqSums::ALL {
                for mask in masks() {
                    let keys = BackwardKeysConfig {
                        head_dim,
                        mask,
                        rotated,
                    };
                    let config = BackwardFusedConfig { keys, sums };
                    let what = format!("{config:?}");
                    // Of the warp that loads, once an item, and of tiles with a mask: none of the loop over
                    // the other tiles.
                    compiled::spilling_at_most(
                        64,
                        &backward_fused::SOURCE,
                        &config.defines(),
                        &what,
                    );
                    if mask == Mask::Causal {
                        compiled::without_spills(
                            &backward_fused::SUMS_SOURCE,
                            &config.sums_defines(),
                            &what,
                        );
                    }
                }
            }
        }
    }
}

/// The CPU's options for what the GPU computes.
fn options(backward: &Backward, sums: DqSums) -> Options {
    Options {
        backward: BackwardForm::OneKernel,
        dq: match sums {
            DqSums::Fp16 => DqAccumulator::Fp16,
            DqSums::Fp32 => DqAccumulator::Fp32,
        },
        ..backward.problem.options(Path::Mxfp8)
    }
}

/// NaN and infinity at the same places, no entry further than codes that rounded to their neighbour and the
/// order of additions can move it, and few that moved at all.
fn compare(
    backward: &Backward,
    sums: DqSums,
    found: &Gradients,
    cpu: &Gradients,
) -> Result<String, String> {
    let Shape {
        heads, kv_heads, ..
    } = backward.problem.shape;
    let problem = &backward.problem;
    let dq = distance(problem, "dQ", heads, &found.dq, &cpu.dq)?;
    let dk = distance(problem, "dK", kv_heads, &found.dk, &cpu.dk)?;
    let dv = distance(problem, "dV", kv_heads, &found.dv, &cpu.dv)?;
    let summary = format!("dQ {dq}; dK {dk}; dV {dv}");
    // Many additions in FP16 come out one way or the other.
    let may_move = if sums == DqSums::Fp16 { 4 } else { 50 };
    let is_near = [(&dq, may_move), (&dk, 50), (&dv, 50)]
        .iter()
        .all(|(x, share)| x.cosine > 0.9999 && x.worst < 0.05 && x.moved * share <= x.entries);
    if is_near { Ok(summary) } else { Err(summary) }
}

fn check(
    failures: &Failures,
    gpu: &Gpu,
    backward: &Backward,
    sums: DqSums,
    case: &str,
) -> Option<Gradients> {
    let cpu = backward.on_cpu_with(&options(backward, sums));
    let mut first: Option<Gradients> = None;
    for way in KeysWay::ALL {
        let case = format!("{case}, {sums:?}, {way:?}");
        let found = failures.check(&case, backward.fused_on_gpu(gpu, way, sums))?;
        let told = failures.check(&case, compare(backward, sums, &found, &cpu))?;
        println!("{case}: {told}");
        if let Some(first) = &first {
            let same = |a: &[f64], b: &[f64]| {
                std::iter::zip(a, b).all(|(a, b)| a.to_bits() == b.to_bits())
            };
            let same = same(&first.dk, &found.dk) && same(&first.dv, &found.dv);
            failures.assert(&case, same, || "dK or dV have other bits".to_owned());
        }
        first = first.or(Some(found));
    }
    first
}

/// The smallest shapes, each of its own kind.
#[test]
#[ignore = "needs a GPU"]
fn a_simple_shapes_agree_with_the_cpu() {
    let gpu = gpu();
    let problems = Backward::simple(700, &mut ChaCha8Rng::seed_from_u64(1));
    let failures = Failures::default();
    problems.par_iter().for_each(|backward| {
        let case = format!("{:?}", backward.problem.shape);
        for sums in DqSums::ALL {
            check(&failures, &gpu, backward, sums, &case);
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn b_random_packed_shapes_agree_with_the_cpu() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(2));
    let problems = random_problems(&mut rng);
    let failures = Failures::default();
    problems
        .into_par_iter()
        .for_each(|(number, _, problem, seed)| {
            let case = format!("{number}: {:?}", problem.shape);
            let backward = Backward::gaussian(problem, &mut ChaCha8Rng::seed_from_u64(seed));
            let sums = DqSums::ALL[number % 2];
            check(&failures, &gpu, &backward, sums, &case);
        });
}

/// A NaN in one operand of a document: NaN gradients where the CPU has them, and other documents as they
/// were, dQ up to the order of additions.
#[test]
#[ignore = "needs a GPU"]
fn c_nan_stays_where_it_is_seen() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(3));
    let mut problems = Vec::new();
    for number in 0..40 {
        let problem = Problem::gaussian(random_shape(&mut rng), &mut rng);
        if problem.tokens() > 0 {
            problems.push((number, problem, rng.random()));
        }
    }
    let failures = Failures::default();
    problems
        .into_par_iter()
        .for_each(|(number, problem, seed)| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut with_nan = Backward::gaussian(problem, &mut rng);
            let data = match number % 4 {
                0 => &mut with_nan.problem.q,
                1 => &mut with_nan.problem.k,
                2 => &mut with_nan.problem.v,
                _ => &mut with_nan.d_o,
            };
            let place = rng.random_range(0..data.len());
            data[place] = bf16::NAN;
            let with_nan = with_nan.again();
            let case = format!("{number}: {:?}, NaN at {place}", with_nan.problem.shape);
            check(&failures, &gpu, &with_nan, DqSums::Fp16, &case);
        });
}

/// dK and dV are the same bits in every run, and dQ is near itself.
#[test]
#[ignore = "needs a GPU"]
fn d_repetitions_agree() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(4));
    let stream = gpu.context().new_stream().unwrap();
    let shape = Shape {
        lengths: vec![700, 1, 300, 0, 1500],
        heads: 16,
        kv_heads: 4,
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
    };
    let backward = Backward::gaussian(Problem::gaussian(shape, &mut rng), &mut rng);
    for sums in DqSums::ALL {
        let mut device = FusedDevice::new(&gpu, &backward, KeysWay::ALL[1], sums);
        device.launch((&*stream).into()).unwrap();
        let first = device.gradients().unwrap();
        let mut graph = device.capture(&gpu, (&*stream).into());
        for _ in 0..10 {
            device.forget();
            graph.replay((&*stream).into()).unwrap();
            let again = device.gradients().unwrap();
            assert!(again.dk == first.dk && again.dv == first.dv);
            let told = compare(&backward, sums, &again, &first);
            assert!(told.is_ok(), "{told:?}");
        }
    }
}

/// An outlier channel of K does not overflow dQ, and queries whose dO are far apart keep their bits.
#[test]
#[ignore = "needs a GPU"]
fn e_sums_in_fp16_neither_overflow_nor_vanish() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(5));
    let failures = Failures::default();
    for head_dim in HEAD_DIMS {
        let shape = Shape {
            lengths: vec![300, 400],
            heads: 2,
            kv_heads: 2,
            head_dim,
            mask: Mask::Causal,
        };
        let dims = head_dim.get();
        let mut problem = Problem::gaussian(shape, &mut rng);
        for k in problem.k.chunks_exact_mut(dims) {
            k[dims / 3] = bf16::from_f32(k[dims / 3].to_f32() * 1000.0);
        }
        let mut outliers = Backward::gaussian(problem, &mut rng);
        for (block, rows) in outliers.d_o.chunks_mut(32 * 2 * dims).enumerate() {
            let factor = [1.0, 1e4, 1e-4][block % 3];
            rows.iter_mut()
                .for_each(|x| *x = bf16::from_f32(x.to_f32() * factor));
        }
        let case = format!("{head_dim:?}");
        let found = check(&failures, &gpu, &outliers, DqSums::Fp16, &case);
        let is_finite = found.is_some_and(|found| found.dq.iter().all(|x| x.is_finite()));
        failures.assert(&case, is_finite, || "dQ overflowed".to_owned());
    }
}
