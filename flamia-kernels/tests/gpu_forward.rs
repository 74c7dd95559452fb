//! The forward kernel: its variants compile without a GPU; on one it gives the CPU's numbers.
//! `cargo test --features cuda -- --ignored` on a machine that has a Hopper GPU, and NVRTC.

mod attention;
mod quantised;

use attention::{Device, Outputs, Problem, Shape, Way};
use flamia_cuda::{Arch, Compiler, Gpu, Program};
use flamia_kernels::cuda::forward::{self, ForwardConfig, ItemRows};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use half::bf16;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const HEAD_DIMS: [HeadDim; 2] = [HeadDim::D128, HeadDim::D64];

fn masks() -> [Mask; 3] {
    [Mask::Causal, Mask::Full, Mask::window(100)]
}

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

#[test]
fn every_variant_compiles_without_spills() {
    let compiler = Compiler::shared().unwrap_or_else(|error| panic!("{error}"));
    for config in configs() {
        let defines = config.defines();
        let program = Program {
            source: &forward::SOURCE,
            defines: &defines,
            arch: Arch::Sm90a,
        };
        let cubin = compiler
            .compile(&program)
            .unwrap_or_else(|error| panic!("{config:?}: {error}"));
        for kernel in &cubin.kernels {
            println!("{config:?}: {kernel}");
        }
        assert_eq!(cubin.warnings, [""; 0], "{config:?}");
        cubin
            .refuse_spills()
            .unwrap_or_else(|error| panic!("{config:?}: {error}"));
    }
}

fn gpu() -> Gpu {
    Gpu::new(0).unwrap_or_else(|error| panic!("{error}"))
}

/// Collects what goes wrong, so that one run on a GPU tells all of it.
#[derive(Default)]
struct Failures(Vec<String>);

impl Failures {
    fn check<T>(&mut self, case: &str, result: Result<T, String>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                println!("FAILED {case}: {error}");
                self.0.push(format!("{case}: {error}"));
                None
            }
        }
    }
}

impl Drop for Failures {
    fn drop(&mut self) {
        let Self(failures) = self;
        if !std::thread::panicking() {
            assert!(
                failures.is_empty(),
                "{}\n  {}",
                failures.len(),
                failures.join("\n  ")
            );
        }
    }
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let finite = || {
        a.iter()
            .zip(b)
            .filter(|(a, b)| a.is_finite() && b.is_finite())
    };
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in finite() {
        ab += a * b;
        aa += a * a;
        bb += b * b;
    }
    if aa == 0.0 && bb == 0.0 {
        1.0
    } else {
        ab / (aa * bb).sqrt()
    }
}

/// How far `found` is from the `hopper` profile: NaN and infinity at the same places, no entry further
/// than codes that rounded to their neighbour can move it, and few that moved at all.
fn compare(problem: &Problem, found: &Outputs, cpu: &Outputs) -> Result<String, String> {
    let Shape {
        heads, head_dim, ..
    } = problem.shape;
    let dims = head_dim.get();
    let differs = |a: f64, b: f64| {
        a.is_nan() != b.is_nan() || (a.is_infinite() || b.is_infinite()) && !a.is_nan() && a != b
    };
    let place = |i: usize| {
        let (token, head) = (i / dims / heads, i / dims % heads);
        let document = problem
            .documents
            .iter()
            .position(|rows| rows.contains(&token));
        format!(
            "row {token} (document {document:?}), head {head}, dim {}",
            i % dims
        )
    };
    let pairs = || found.o.iter().zip(&cpu.o).enumerate();
    if let Some((i, (a, b))) = pairs().find(|(_, (a, b))| differs(**a, **b)) {
        return Err(format!("O is {a}, expected {b} at {}", place(i)));
    }
    let lse = || found.lse.iter().zip(&cpu.lse).enumerate();
    if let Some((i, (a, b))) = lse().find(|(_, (a, b))| differs(**a, **b)) {
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
    let largest = |x: &[f64]| {
        x.iter()
            .filter(|x| x.is_finite())
            .fold(1e-30, |m: f64, x| m.max(x.abs()))
    };
    let scale = largest(&cpu.o);
    let error = |a: f64, b: f64| if a.is_nan() { 0.0 } else { (a - b).abs() };
    let (worst, value) = pairs()
        .map(|(i, (a, b))| (i, error(*a, *b)))
        .fold((0, 0.0), |m, x| if x.1 > m.1 { x } else { m });
    // Beyond a unit of BF16 and what the order of sums gives.
    let moved = pairs()
        .filter(|(_, (a, b))| error(**a, **b) > b.abs() / 128.0 + 1e-4 * scale)
        .count();
    let cosine = cosine(&found.o, &cpu.o);
    let summary = format!(
        "cosine 1 - {:.1e}, worst {:.1e} of {scale:.1e} at {}, {moved} of {} moved, LSE {lse_error:.1e}",
        1.0 - cosine,
        value,
        place(worst),
        found.o.len()
    );
    let is_near = cosine > 0.99999
        && value < 0.05 * scale
        && moved * 100 <= found.o.len()
        && lse_error < 1e-5;
    if is_near { Ok(summary) } else { Err(summary) }
}

fn check(
    failures: &mut Failures,
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
    let mut failures = Failures::default();
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
                check(&mut failures, &gpu, &problem, &all_ways(), &case);
            }
        }
    }
}

/// A length that likes the edges of blocks, warpgroups, tiles and items.
fn edgy_length(rng: &mut impl Rng) -> usize {
    const EDGES: [usize; 8] = [0, 1, 32, 64, 128, 192, 256, 384];
    match rng.random_range(0..3) {
        0 => rng.random_range(0..450),
        1 => EDGES[rng.random_range(0..EDGES.len())],
        _ => (EDGES[rng.random_range(1..EDGES.len())] + rng.random_range(0..3)).saturating_sub(1),
    }
}

fn random_shape(rng: &mut impl Rng) -> Shape {
    let lengths: Vec<_> = (0..rng.random_range(1..7))
        .map(|_| edgy_length(rng))
        .collect();
    let kv_heads = rng.random_range(1..3);
    let groups = [1, 2, 3, 4, 8, 16];
    let longest = lengths.iter().copied().max().unwrap_or_default().max(1);
    Shape {
        lengths,
        heads: kv_heads * groups[rng.random_range(0..if kv_heads == 1 { 6 } else { 3 })],
        kv_heads,
        head_dim: HEAD_DIMS[rng.random_range(0..2)],
        mask: match rng.random_range(0..4) {
            0 => Mask::Full,
            1 => Mask::window(rng.random_range(1..=longest + 40)),
            _ => Mask::Causal,
        },
    }
}

/// Operands at sizes that differ from run to run of rows: zeros, and exponents far apart.
fn roughen(problem: &mut Problem, rng: &mut impl Rng) {
    let tokens = problem.tokens();
    let dims = problem.shape.head_dim.get();
    let heads = [
        problem.shape.heads,
        problem.shape.kv_heads,
        problem.shape.kv_heads,
    ];
    for (i, (data, heads)) in [&mut problem.q, &mut problem.k, &mut problem.v]
        .into_iter()
        .zip(heads)
        .enumerate()
    {
        let mut start = 0;
        while start < tokens {
            let end = tokens.min(start + rng.random_range(1..90));
            let spread = if i == 2 { 30 } else { 2 };
            let scale = match rng.random_range(0..6) {
                0 => 0.0,
                1 | 2 => 2f32.powi(rng.random_range(-spread..=spread)),
                _ => 1.0,
            };
            for x in &mut data[start * heads * dims..end * heads * dims] {
                *x = bf16::from_f32(x.to_f32() * scale);
            }
            start = end;
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn b_random_packed_shapes_agree_with_the_cpu() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(2));
    let mut failures = Failures::default();
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
        let Some(found) = check(&mut failures, &gpu, &problem, &all_ways(), &case) else {
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
    let mut failures = Failures::default();
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
        let Some(found) = check(&mut failures, &gpu, &with_nan, &all_ways(), &case) else {
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
    let mut failures = Failures::default();
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
    let mut failures = Failures::default();
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
            check(&mut failures, &gpu, &problem, &all_ways(), &case);
        }
    }
}
