//! The forward kernel: its variants compile without a GPU; on one it gives the CPU's numbers.
//! `cargo test --features cuda -- --ignored` on a machine that has a Hopper GPU, and NVRTC.

mod attention;
mod compiled;
mod quantised;

use attention::check::{Failures, cosine, differs_in_kind, distance};
use attention::random::{random_shape, roughen};
use attention::{Device, HEAD_DIMS, Outputs, Problem, Shape, Way, gpu, masks};
use flamia_cuda::Gpu;
use flamia_kernels::cuda::forward::{self, ForwardConfig, ItemRows};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn configs() -> impl Iterator<Item = ForwardConfig> {
    HEAD_DIMS.into_iter().flat_map(|head_dim| {
        masks().into_iter().flat_map(move |mask| {
            ItemRows::ALL.map(|item_rows| ForwardConfig {
                head_dim,
                mask,
                item_rows,
            })
        })
    })
}

/// But for one register, in tiles where something is masked, of which there is one an item: 160 registers hold
/// 132 of accumulators there, and the codes.
#[test]
fn every_variant_compiles_without_spills() {
    for config in configs() {
        let what = format!("{config:?}");
        match config.head_dim {
            HeadDim::D64 => {
                compiled::without_spills(&forward::SOURCE, &config.defines(), &what);
            }
            HeadDim::D128 => {
                compiled::spilling_at_most(4, &forward::SOURCE, &config.defines(), &what);
            }
        }
    }
}

/// How far `found` is from the `hopper` profile: NaN and infinity at the same places, no entry further
/// than codes that rounded to their neighbour can move it, and few that moved at all.
fn compare(problem: &Problem, found: &Outputs, cpu: &Outputs) -> Result<String, String> {
    let o = distance(problem, "O", problem.shape.heads, &found.o, &cpu.o)?;
    let lse = || found.lse.iter().zip(&cpu.lse).enumerate();
    if let Some((i, (a, b))) = lse().find(|(_, (a, b))| differs_in_kind(**a, **b)) {
        let (head, token) = (i / problem.tokens(), i % problem.tokens());
        return Err(format!(
            "LSE is {a}, expected {b} at row {token}, head {head}"
        ));
    }
    let lse_error = lse()
        .map(|(_, (a, b))| {
            if a == b || a.is_nan() {
                0.0
            } else {
                (a - b).abs() / b.abs().max(1.0)
            }
        })
        .fold(0.0, f64::max);
    let summary = format!("{o}, LSE {lse_error:.1e}");
    let is_near =
        o.cosine > 0.99999 && o.worst < 0.05 && o.moved * 100 <= o.entries && lse_error < 1e-5;
    if is_near { Ok(summary) } else { Err(summary) }
}

fn check(
    failures: &Failures,
    gpu: &Gpu,
    problem: &Problem,
    ways: &[Way],
    case: &str,
) -> Option<Outputs> {
    let cpu = problem.on_cpu(Path::Mxfp8);
    let mut first: Option<Outputs> = None;
    for way in ways {
        let case = format!("{case}, {way:?}");
        let found = failures.check(&case, problem.on_gpu(gpu, *way))?;
        match &first {
            None => {
                let told = failures.check(&case, compare(problem, &found, &cpu))?;
                println!("{case}: {told}");
                first = Some(found);
            }
            Some(first) if first.bits() != found.bits() => {
                let count = first
                    .bits()
                    .iter()
                    .zip(found.bits())
                    .filter(|(a, b)| **a != *b)
                    .count();
                failures.check::<()>(
                    &case,
                    Err(format!("{count} values differ from {:?}", ways[0])),
                );
            }
            Some(_) => {}
        }
    }
    first
}

fn all_ways() -> Vec<Way> {
    ItemRows::ALL
        .into_iter()
        .flat_map(|item_rows| {
            [(false, usize::MAX), (true, 1)].map(|(is_dynamic, heads_per_section)| Way {
                item_rows,
                is_dynamic,
                heads_per_section,
            })
        })
        .collect()
}

/// The smallest shapes first, each of its own kind, so that a fault shows where it is simplest.
#[test]
#[ignore = "needs a GPU"]
fn a_simple_shapes_agree_with_the_cpu() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(1));
    let failures = Failures::default();
    for head_dim in HEAD_DIMS {
        for lengths in [
            vec![1],
            vec![32],
            vec![64],
            vec![128],
            vec![192],
            vec![256],
            vec![1000],
            vec![5, 0, 70, 33],
        ] {
            for mask in masks() {
                let shape = Shape {
                    lengths: lengths.clone(),
                    heads: 2,
                    kv_heads: 1,
                    head_dim,
                    mask,
                };
                let case = format!("{shape:?}");
                let problem = Problem::gaussian(shape, &mut rng);
                check(&failures, &gpu, &problem, &all_ways(), &case);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn b_random_packed_shapes_agree_with_the_cpu() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(2));
    let failures = Failures::default();
    let mut empty = 0;
    for number in 0..200 {
        let mut problem = Problem::gaussian(random_shape(&mut rng), &mut rng);
        if problem.tokens() == 0 {
            empty += 1;
            continue;
        }
        let is_rough = number % 4 == 3;
        if is_rough {
            roughen(&mut problem, &mut rng);
        }
        let case = format!("{number}: {:?}, rough {is_rough}", problem.shape);
        let Some(found) = check(&failures, &gpu, &problem, &all_ways(), &case) else {
            continue;
        };
        if !is_rough && problem.tokens() > 100 {
            let cosine = cosine(&found.o, &problem.on_cpu(Path::Reference).o);
            let result = if cosine > 0.997 {
                Ok(())
            } else {
                Err(format!("{cosine}"))
            };
            failures.check(&format!("{case}, exact attention"), result);
        }
    }
    assert!(empty < 20, "{empty} empty rows say nothing");
}

/// A NaN in one operand of a document: NaN results where the CPU has them, and no other bit moves.
#[test]
#[ignore = "needs a GPU"]
fn c_nan_stays_where_it_is_seen() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(3));
    let failures = Failures::default();
    let mut poisoned = 0;
    for number in 0..60 {
        let problem = Problem::gaussian(random_shape(&mut rng), &mut rng);
        if problem.tokens() == 0 {
            continue;
        }
        let mut with_nan = problem.clone();
        let operand = number % 3;
        let data = match operand {
            0 => &mut with_nan.q,
            1 => &mut with_nan.k,
            _ => &mut with_nan.v,
        };
        let place = rng.random_range(0..data.len());
        data[place] = bf16::NAN;
        let case = format!(
            "{number}: {:?}, NaN in operand {operand} at {place}",
            problem.shape
        );
        let Some(found) = check(&failures, &gpu, &with_nan, &all_ways(), &case) else {
            continue;
        };
        poisoned += usize::from(found.o.iter().any(|x| x.is_nan()));
        let Some(clean) = failures.check(&case, problem.on_gpu(&gpu, Way::PLAIN)) else {
            continue;
        };
        let dims = problem.shape.head_dim.get();
        let token = place
            / dims
            / [
                problem.shape.heads,
                problem.shape.kv_heads,
                problem.shape.kv_heads,
            ][operand];
        let document = problem
            .documents
            .iter()
            .find(|rows| rows.contains(&token))
            .unwrap();
        let row = problem.shape.heads * dims;
        let block = document.start + (token - document.start) / 32 * 32;
        // Rows of another document, and under a causal mask rows before the block.
        let is_safe = |token: usize| {
            !document.contains(&token) || problem.shape.mask.is_causal() && token < block
        };
        let moved = (0..found.o.len())
            .find(|&i| is_safe(i / row) && found.o[i].to_bits() != clean.o[i].to_bits());
        let result = moved.map_or(Ok(()), |i| {
            Err(format!(
                "row {} has {} for {}",
                i / row,
                found.o[i],
                clean.o[i]
            ))
        });
        failures.check(&format!("{case}, bits"), result);
    }
    assert!(poisoned > 30, "only {poisoned} cases had a NaN to see");
}

#[test]
#[ignore = "needs a GPU"]
fn d_replays_and_repetitions_give_the_same_bits() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(4));
    let stream = gpu.context().new_stream().unwrap();
    for is_dynamic in [false, true] {
        let shape = Shape {
            lengths: vec![700, 1, 300, 0, 1500],
            heads: 16,
            kv_heads: 4,
            head_dim: HeadDim::D128,
            mask: Mask::Causal,
        };
        let problem = Problem::gaussian(shape, &mut rng);
        let way = Way {
            item_rows: ItemRows::R192,
            is_dynamic,
            heads_per_section: 4,
        };
        let mut device = Device::new(&gpu, &problem, way);
        device.launch((&*stream).into()).unwrap();
        let eager = device.outputs().unwrap().bits();
        let mut graph = device.capture(&gpu, (&*stream).into());
        for _ in 0..20 {
            device.forget();
            graph.replay((&*stream).into()).unwrap();
            assert!(device.outputs().unwrap().bits() == eager);
        }
    }
}

/// A document's result does not depend on where it lies.
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
            let problem = Problem::gaussian(shape, &mut rng);
            let packed = problem.on_gpu(&gpu, Way::PLAIN).unwrap();
            let row = 2 * head_dim.get();
            for rows in problem.documents.iter() {
                let cut = |x: &[bf16]| x[rows.start * row..rows.end * row].to_vec();
                let alone = Problem {
                    shape: Shape {
                        lengths: vec![rows.len()],
                        ..problem.shape.clone()
                    },
                    documents: flamia_sched::Documents::single(rows.len()).unwrap(),
                    q: cut(&problem.q),
                    k: cut(&problem.k),
                    v: cut(&problem.v),
                };
                let alone = alone.on_gpu(&gpu, Way::PLAIN).unwrap();
                let same = packed.o[rows.start * row..rows.end * row] == alone.o[..];
                let result = if same {
                    Ok(())
                } else {
                    Err("other bits".to_owned())
                };
                failures.check(&format!("{head_dim:?} {mask} {rows:?}"), result);
            }
        }
    }
}

/// References that jump by more powers of two than FP32 has exponents above 1: later keys have a V of
/// zeros, which folds as 2^-96, and earlier ones a large V.
#[test]
#[ignore = "needs a GPU"]
fn f_references_may_jump_by_any_power() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(6));
    let failures = Failures::default();
    for head_dim in HEAD_DIMS {
        for (mask, edge) in [(Mask::Causal, 1000), (Mask::Causal, 777), (Mask::Full, 500)] {
            let shape = Shape {
                lengths: vec![1100],
                heads: 2,
                kv_heads: 2,
                head_dim,
                mask,
            };
            let case = format!("{shape:?}, {edge}");
            let mut problem = Problem::gaussian(shape, &mut rng);
            let (large, zero) = problem.v.split_at_mut(edge * 2 * head_dim.get());
            large
                .iter_mut()
                .for_each(|x| *x *= bf16::from_f32(2f32.powi(60)));
            zero.fill(bf16::ZERO);
            check(&failures, &gpu, &problem, &all_ways(), &case);
        }
    }
}
