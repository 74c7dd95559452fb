//! The kernel of dK and dV: its variants compile without a GPU; on one it gives the CPU's numbers.
//! `cargo test --features cuda -- --ignored` on a machine that has a Hopper GPU, and NVRTC.

mod attention;
mod compiled;
mod quantised;

use std::sync::atomic::{AtomicUsize, Ordering};

use attention::check::{Failures, cosine, distance};
use attention::gradients::{Backward, Gradients};
use attention::keys::{KeyGradients, KeysDevice, KeysWay};
use attention::random::{random_problems, random_shape};
use attention::{HEAD_DIMS, Problem, Shape, gpu, masks};
use flamia_cuda::Gpu;
use flamia_kernels::cuda::backward_keys::{self, BackwardKeysConfig};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

#[test]
fn every_variant_compiles_without_spills() {
    for head_dim in HEAD_DIMS {
        for mask in masks() {
            for rotated in [false, true] {
                let config = BackwardKeysConfig {
                    head_dim,
                    mask,
                    rotated,
                };
                let what = format!("{config:?}");
                if rotated {
                    // One register, once an item.
                    compiled::spilling_at_most(8, &backward_keys::SOURCE, &config.defines(), &what);
                } else {
                    compiled::without_spills(&backward_keys::SOURCE, &config.defines(), &what);
                }
            }
        }
    }
}

/// NaN and infinity at the same places, no entry further than codes that rounded to their neighbour can
/// move it, and few that moved at all.
fn compare(backward: &Backward, found: &KeyGradients, cpu: &Gradients) -> Result<String, String> {
    let heads = backward.problem.shape.kv_heads;
    let dk = distance(&backward.problem, "dK", heads, &found.dk, &cpu.dk)?;
    let dv = distance(&backward.problem, "dV", heads, &found.dv, &cpu.dv)?;
    let summary = format!("dK {dk}; dV {dv}");
    let is_near = [dk, dv]
        .iter()
        .all(|x| x.cosine > 0.99999 && x.worst < 0.05 && x.moved * 50 <= x.entries);
    if is_near { Ok(summary) } else { Err(summary) }
}

fn check(failures: &Failures, gpu: &Gpu, backward: &Backward, case: &str) -> Option<KeyGradients> {
    let cpu = backward.on_cpu(Path::Mxfp8);
    let [first, second] = KeysWay::ALL;
    let found = failures.check(case, backward.keys_on_gpu(gpu, first))?;
    let told = failures.check(case, compare(backward, &found, &cpu))?;
    println!("{case}: {told}");
    let other = failures.check(case, backward.keys_on_gpu(gpu, second))?;
    let count = std::iter::zip(found.bits(), other.bits())
        .filter(|(a, b)| a != b)
        .count();
    failures.assert(case, count == 0, || {
        format!("{count} values differ with {second:?}")
    });
    Some(found)
}

/// The smallest shapes first, each of its own kind, so that a fault shows where it is simplest.
#[test]
#[ignore = "needs a GPU"]
fn a_simple_shapes_agree_with_the_cpu() {
    let gpu = gpu();
    let problems = Backward::simple(700, &mut ChaCha8Rng::seed_from_u64(1));
    let failures = Failures::default();
    problems.par_iter().for_each(|backward| {
        let case = format!("{:?}", backward.problem.shape);
        check(&failures, &gpu, backward, &case);
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
        .for_each(|(number, is_rough, problem, seed)| {
            let case = format!("{number}: {:?}, rough {is_rough}", problem.shape);
            let backward = Backward::gaussian(problem, &mut ChaCha8Rng::seed_from_u64(seed));
            let Some(found) = check(&failures, &gpu, &backward, &case) else {
                return;
            };
            if !is_rough && backward.problem.tokens() > 100 {
                let exact = backward.on_cpu(Path::Reference);
                let cosines = [cosine(&found.dk, &exact.dk), cosine(&found.dv, &exact.dv)];
                failures.assert(&case, cosines.iter().all(|x| *x > 0.995), || {
                    format!("{cosines:?} to exact attention")
                });
            }
        });
}

/// A NaN in one operand of a document: NaN gradients where the CPU has them, and no other bit moves.
#[test]
#[ignore = "needs a GPU"]
fn c_nan_stays_where_it_is_seen() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(3));
    let mut problems = Vec::new();
    for number in 0..60 {
        let problem = Problem::gaussian(random_shape(&mut rng), &mut rng);
        if problem.tokens() > 0 {
            problems.push((number, problem, rng.random()));
        }
    }
    let (failures, poisoned) = (Failures::default(), AtomicUsize::new(0));
    problems
        .into_par_iter()
        .for_each(|(number, problem, seed)| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let clean = Backward::gaussian(problem, &mut rng);
            let mut with_nan = clean.clone();
            let operand = number % 4;
            let data = match operand {
                0 => &mut with_nan.problem.q,
                1 => &mut with_nan.problem.k,
                2 => &mut with_nan.problem.v,
                _ => &mut with_nan.d_o,
            };
            let place = rng.random_range(0..data.len());
            let row = data.len() / clean.problem.tokens();
            data[place] = bf16::NAN;
            let with_nan = with_nan.again();
            let case = format!(
                "{number}: {:?}, NaN in operand {operand} at {place}",
                clean.problem.shape
            );
            let clean_found = failures.check(&case, clean.keys_on_gpu(&gpu, KeysWay::ALL[0]));
            let found = check(&failures, &gpu, &with_nan, &case);
            let (Some(found), Some(clean_found)) = (found, clean_found) else {
                return;
            };
            let has_nan = found.dk.iter().any(|x| x.is_nan());
            poisoned.fetch_add(usize::from(has_nan), Ordering::Relaxed);
            let mut documents = clean.problem.documents.iter();
            let document = documents
                .find(|rows| rows.contains(&(place / row)))
                .unwrap();
            let gradient_row = found.dk.len() / clean.problem.tokens();
            let moved = (0..found.dk.len()).find(|&i| {
                !document.contains(&(i / gradient_row))
                    && (found.dk[i].to_bits() != clean_found.dk[i].to_bits()
                        || found.dv[i].to_bits() != clean_found.dv[i].to_bits())
            });
            failures.assert(&case, moved.is_none(), || {
                format!("another document's entry {moved:?} has other bits")
            });
        });
    let poisoned = poisoned.into_inner();
    assert!(poisoned > 30, "only {poisoned} cases had a NaN to see");
}

#[test]
#[ignore = "needs a GPU"]
fn d_replays_and_repetitions_give_the_same_bits() {
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
    for way in KeysWay::ALL {
        let mut device = KeysDevice::new(&gpu, &backward, way);
        device.launch((&*stream).into()).unwrap();
        let eager = device.gradients().unwrap().bits();
        let mut graph = device.capture(&gpu, (&*stream).into());
        for _ in 0..20 {
            device.forget();
            graph.replay((&*stream).into()).unwrap();
            assert!(device.gradients().unwrap().bits() == eager);
        }
    }
}

/// A document's gradients do not depend on where it lies.
#[test]
#[ignore = "needs a GPU"]
fn e_documents_are_alone() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(5));
    let failures = Failures::default();
    for head_dim in HEAD_DIMS {
        for mask in masks() {
            let shape = Shape {
                lengths: vec![517, 300, 45],
                heads: 2,
                kv_heads: 2,
                head_dim,
                mask,
            };
            let packed = Backward::gaussian(Problem::gaussian(shape, &mut rng), &mut rng);
            let together = packed.keys_on_gpu(&gpu, KeysWay::ALL[0]).unwrap();
            for rows in packed.problem.documents.iter() {
                let alone = packed.document(rows.clone());
                let alone = alone.keys_on_gpu(&gpu, KeysWay::ALL[0]).unwrap();
                let row = 2 * head_dim.get();
                let cut = |x: &[f64]| x[rows.start * row..rows.end * row].to_vec();
                let case = format!("{head_dim:?} {mask} {rows:?}");
                let same = cut(&together.dk) == alone.dk && cut(&together.dv) == alone.dv;
                failures.assert(&case, same, || "other bits".to_owned());
            }
        }
    }
}

/// An outlier channel of K, and a document that is much larger than its neighbours: neither does
/// anything to what others get.
#[test]
#[ignore = "needs a GPU"]
fn f_outliers_stay_where_they_are() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(6));
    let failures = Failures::default();
    for head_dim in HEAD_DIMS {
        let shape = Shape {
            lengths: vec![300, 400, 260],
            heads: 2,
            kv_heads: 2,
            head_dim,
            mask: Mask::Causal,
        };
        let (dims, row) = (head_dim.get(), 2 * head_dim.get());
        let gaussian = Problem::gaussian(shape, &mut rng);
        let mut outliers = gaussian.clone();
        for k in outliers.k.chunks_exact_mut(dims) {
            k[dims / 3] = bf16::from_f32(k[dims / 3].to_f32() * 1000.0);
        }
        let outliers = Backward::gaussian(outliers, &mut rng);
        check(
            &failures,
            &gpu,
            &outliers,
            &format!("{head_dim:?}, outlier channel"),
        );

        let plain = Backward::gaussian(gaussian, &mut rng);
        let mut large = plain.clone();
        let grown = 300 * row..700 * row;
        for data in [&mut large.problem.v, &mut large.d_o] {
            for x in &mut data[grown.clone()] {
                *x = bf16::from_f32(x.to_f32() * 1e4);
            }
        }
        let case = format!("{head_dim:?}, one document x 1e4");
        let large = large.again();
        let Some(found) = check(&failures, &gpu, &large, &case) else {
            continue;
        };
        let plain = plain.keys_on_gpu(&gpu, KeysWay::ALL[0]).unwrap();
        let others = |x: &[f64]| [&x[..grown.start], &x[grown.end..]].concat();
        let same = others(&found.dk) == others(&plain.dk) && others(&found.dv) == others(&plain.dv);
        failures.assert(&case, same, || "its neighbours changed".to_owned());
    }
}
