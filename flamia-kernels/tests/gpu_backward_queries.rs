//! The backward kernel of dQ: its variants compile without a GPU; on one it gives the CPU's numbers.
//! `cargo test --features cuda -- --ignored` on a machine that has a Hopper GPU, and NVRTC.

mod attention;
mod gradients;
mod quantised;

use attention::{Problem, Shape};
use flamia_cuda::{Arch, Compiler, Gpu, Program};
use flamia_kernels::cuda::backward_queries::{self, BackwardQueriesConfig};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use flamia_sched::Documents;
use gradients::{Backward, Device, Way};
use half::bf16;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const HEAD_DIMS: [HeadDim; 2] = [HeadDim::D128, HeadDim::D64];

fn masks() -> [Mask; 3] {
    [Mask::Causal, Mask::Full, Mask::window(100)]
}

#[test]
fn every_variant_compiles_without_spills() {
    let compiler = Compiler::shared().unwrap_or_else(|error| panic!("{error}"));
    for head_dim in HEAD_DIMS {
        for mask in masks() {
            for hadamard in [false, true] {
                let config = BackwardQueriesConfig {
                    head_dim,
                    mask,
                    hadamard,
                };
                let program = Program {
                    source: &backward_queries::SOURCE,
                    defines: &config.defines(),
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
        result
            .inspect_err(|error| {
                println!("FAILED {case}: {error}");
                self.0.push(format!("{case}: {error}"));
            })
            .ok()
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

fn largest(x: &[f64]) -> f64 {
    x.iter()
        .filter(|x| x.is_finite())
        .fold(1e-30, |m: f64, x| m.max(x.abs()))
}

/// Of finite pairs.
fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in a.iter().zip(b).filter(|(a, b)| (*a + *b).is_finite()) {
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

/// How far `found` is from the `hopper` profile: NaN at the same places, no entry further than codes that
/// rounded to their neighbour can move it, and few that moved at all. Rows are measured by themselves,
/// since their sizes may be far apart.
fn compare(backward: &Backward, found: &[f64], cpu: &[f64]) -> Result<String, String> {
    let Shape {
        heads, head_dim, ..
    } = backward.problem.shape;
    let dims = head_dim.get();
    let place = |row: usize| {
        let (token, head) = (row / heads, row % heads);
        let documents = &backward.problem.documents;
        let document = documents.iter().position(|rows| rows.contains(&token));
        format!("row {token} (document {document:?}), head {head}")
    };
    let (mut worst, mut worst_row, mut moved) = (0.0, 0, 0);
    for (row, (a, b)) in found.chunks(dims).zip(cpu.chunks(dims)).enumerate() {
        if let Some(i) = (0..dims).find(|&i| a[i].is_nan() != b[i].is_nan()) {
            return Err(format!(
                "dQ is {}, expected {} at {}, dim {i}",
                a[i],
                b[i],
                place(row)
            ));
        }
        let scale = largest(b);
        for (a, b) in a.iter().zip(b) {
            let error = if a.is_nan() { 0.0 } else { (a - b).abs() };
            if error / scale > worst {
                (worst, worst_row) = (error / scale, row);
            }
            // Beyond a unit of BF16 and what the order of sums gives.
            moved += usize::from(error > b.abs() / 128.0 + 1e-4 * scale);
        }
    }
    let cosine = cosine(found, cpu);
    let summary = format!(
        "cosine 1 - {:.1e}, worst {worst:.1e} of the row at {}, {moved} of {} moved",
        1.0 - cosine,
        place(worst_row),
        found.len()
    );
    let is_near = cosine > 0.99999 && worst < 0.1 && moved * 50 <= found.len();
    if is_near { Ok(summary) } else { Err(summary) }
}

fn check(failures: &mut Failures, gpu: &Gpu, backward: &Backward, case: &str) -> Option<Vec<f64>> {
    let cpu = backward.on_cpu(Path::Mxfp8);
    let mut first: Option<Vec<f64>> = None;
    for way in Way::ALL {
        let case = format!("{case}, {way:?}");
        let found = failures.check(&case, backward.on_gpu(gpu, way))?;
        match &first {
            None => {
                let told = failures.check(&case, compare(backward, &found, &cpu));
                println!("{case}: {}", told.unwrap_or_default());
                first = Some(found);
            }
            Some(first) => {
                failures.check(&case, same_bits(first, &found));
            }
        }
    }
    first
}

fn same_bits(a: &[f64], b: &[f64]) -> Result<(), String> {
    let count = a
        .iter()
        .zip(b)
        .filter(|(a, b)| a.to_bits() != b.to_bits())
        .count();
    if count == 0 && a.len() == b.len() {
        Ok(())
    } else {
        Err(format!("{count} values differ"))
    }
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
            vec![2],
            vec![32],
            vec![64],
            vec![128],
            vec![192],
            vec![256],
            vec![700],
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
                let backward = Backward::gaussian(shape, &mut rng);
                check(&mut failures, &gpu, &backward, &case);
            }
        }
    }
}

/// A length that likes the edges of blocks, warpgroups and tiles.
fn edgy_length(rng: &mut impl Rng) -> usize {
    const EDGES: [usize; 7] = [0, 1, 32, 64, 128, 256, 384];
    match rng.random_range(0..3) {
        0 => rng.random_range(0..450),
        1 => EDGES[rng.random_range(0..EDGES.len())],
        _ => (EDGES[rng.random_range(1..EDGES.len())] + rng.random_range(0..3)).saturating_sub(1),
    }
}

fn random_shape(rng: &mut impl Rng) -> Shape {
    let lengths: Vec<_> = (0..rng.random_range(1..6))
        .map(|_| edgy_length(rng))
        .collect();
    let longest = lengths.iter().copied().max().unwrap_or_default().max(1);
    let kv_heads = rng.random_range(1..3);
    let groups = [1, 2, 3, 4, 16];
    Shape {
        lengths,
        heads: kv_heads * groups[rng.random_range(0..if kv_heads == 1 { 5 } else { 3 })],
        kv_heads,
        head_dim: HEAD_DIMS[rng.random_range(0..2)],
        mask: match rng.random_range(0..4) {
            0 => Mask::Full,
            1 => Mask::window(rng.random_range(1..=longest + 40)),
            _ => Mask::Causal,
        },
    }
}

/// Multiplies runs of an operand's rows with powers of two, and some with zero.
fn roughen(data: &mut [bf16], row: usize, spread: i32, rng: &mut impl Rng) {
    let mut rest = data;
    while !rest.is_empty() {
        let run = (row * rng.random_range(1..90)).min(rest.len());
        let scale = match rng.random_range(0..6) {
            0 => 0.0,
            1 | 2 => 2f32.powi(rng.random_range(-spread..=spread)),
            _ => 1.0,
        };
        let (now, later) = rest.split_at_mut(run);
        now.iter_mut()
            .for_each(|x| *x = bf16::from_f32(x.to_f32() * scale));
        rest = later;
    }
}

#[test]
#[ignore = "needs a GPU"]
fn b_random_packed_shapes_agree_with_the_cpu() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(2));
    let mut failures = Failures::default();
    let mut empty = 0;
    for number in 0..100 {
        let Backward {
            mut problem,
            mut d_o,
            ..
        } = Backward::gaussian(random_shape(&mut rng), &mut rng);
        if problem.tokens() == 0 {
            empty += 1;
            continue;
        }
        let is_rough = number % 4 == 3;
        if is_rough {
            let dims = problem.shape.head_dim.get();
            let (row, kv_row) = (problem.shape.heads * dims, problem.shape.kv_heads * dims);
            roughen(&mut problem.q, row, 2, &mut rng);
            roughen(&mut problem.k, kv_row, 2, &mut rng);
            roughen(&mut problem.v, kv_row, 20, &mut rng);
            roughen(&mut d_o, row, 20, &mut rng);
        }
        let backward = Backward::new(problem, d_o);
        let case = format!("{number}: {:?}, rough {is_rough}", backward.problem.shape);
        let Some(found) = check(&mut failures, &gpu, &backward, &case) else {
            continue;
        };
        if !is_rough && backward.problem.tokens() > 100 {
            let cosine = cosine(&found, &backward.on_cpu(Path::Reference));
            let result = (cosine > 0.99).then_some(()).ok_or(format!("{cosine}"));
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
        let clean = Backward::gaussian(random_shape(&mut rng), &mut rng);
        if clean.problem.tokens() == 0 {
            continue;
        }
        let (mut problem, mut d_o) = (clean.problem.clone(), clean.d_o.clone());
        let operand = number % 4;
        let data = match operand {
            0 => &mut problem.q,
            1 => &mut problem.k,
            2 => &mut problem.v,
            _ => &mut d_o,
        };
        let place = rng.random_range(0..data.len());
        data[place] = bf16::NAN;
        let with_nan = Backward::new(problem, d_o);
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = clean.problem.shape;
        let case = format!(
            "{number}: {:?}, NaN in operand {operand} at {place}",
            clean.problem.shape
        );
        let Some(found) = check(&mut failures, &gpu, &with_nan, &case) else {
            continue;
        };
        poisoned += usize::from(found.iter().any(|x| x.is_nan()));
        let Some(clean_dq) = failures.check(&case, clean.on_gpu(&gpu, Way::PLAIN)) else {
            continue;
        };
        let row = head_dim.get() * [heads, kv_heads, kv_heads, heads][operand];
        let token = place / row;
        let documents = &clean.problem.documents;
        let document = documents.iter().find(|rows| rows.contains(&token)).unwrap();
        let block = document.start + (token - document.start) / 32 * 32;
        // Rows of another document, and under a causal mask rows before the block.
        let is_safe =
            |token: usize| !document.contains(&token) || mask.is_causal() && token < block;
        let row = head_dim.get() * heads;
        let moved = (0..found.len())
            .find(|&i| is_safe(i / row) && found[i].to_bits() != clean_dq[i].to_bits());
        let result = moved.map_or(Ok(()), |i| {
            Err(format!(
                "row {} has {} for {}",
                i / row,
                found[i],
                clean_dq[i]
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
    let shape = Shape {
        lengths: vec![700, 1, 300, 0, 1500],
        heads: 16,
        kv_heads: 4,
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
    };
    // Bits against bits need no oracle, and so no forward pass of the CPU.
    let backward = Backward::without_forward(shape, &mut rng);
    for is_dynamic in [false, true] {
        let way = Way {
            is_dynamic,
            heads_per_section: 4,
        };
        let mut device = Device::new(&gpu, &backward, way);
        device.launch((&*stream).into()).unwrap();
        let eager = device.dq().unwrap();
        let mut graph = device.capture(&gpu, (&*stream).into());
        for _ in 0..20 {
            device.forget();
            graph.replay((&*stream).into()).unwrap();
            same_bits(&device.dq().unwrap(), &eager).unwrap();
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
            let backward = Backward::gaussian(shape, &mut rng);
            let packed = backward.on_gpu(&gpu, Way::PLAIN).unwrap();
            let problem = &backward.problem;
            let row = 2 * head_dim.get();
            for rows in problem.documents.iter() {
                let cut = |x: &[bf16]| x[rows.start * row..rows.end * row].to_vec();
                let alone = Problem {
                    shape: Shape {
                        lengths: vec![rows.len()],
                        ..problem.shape.clone()
                    },
                    documents: Documents::single(rows.len()).unwrap(),
                    q: cut(&problem.q),
                    k: cut(&problem.k),
                    v: cut(&problem.v),
                };
                let alone = Backward::new(alone, cut(&backward.d_o));
                let alone = alone.on_gpu(&gpu, Way::PLAIN).unwrap();
                let result = same_bits(&packed[rows.start * row..rows.end * row], &alone);
                failures.check(&format!("{head_dim:?} {mask} {rows:?}"), result);
            }
        }
    }
}

/// Channels of K a thousand times as large as the others, and a document ten thousand times as large as
/// its neighbours.
#[test]
#[ignore = "needs a GPU"]
fn f_outliers_do_not_overflow() {
    let (gpu, mut rng) = (gpu(), ChaCha8Rng::seed_from_u64(6));
    let mut failures = Failures::default();
    for head_dim in HEAD_DIMS {
        let shape = Shape {
            lengths: vec![400, 200, 300],
            heads: 2,
            kv_heads: 2,
            head_dim,
            mask: Mask::Causal,
        };
        let dims = head_dim.get();
        let scale = |x: &mut bf16, factor: f32| *x = bf16::from_f32(x.to_f32() * factor);
        let Backward {
            mut problem, d_o, ..
        } = Backward::gaussian(shape.clone(), &mut rng);
        for row in problem.k.chunks_mut(dims) {
            for channel in [3, 40] {
                scale(&mut row[channel], 1000.0);
            }
        }
        let outliers = Backward::new(problem, d_o);
        let case = format!("{head_dim:?}, outlier channels");
        if let Some(found) = check(&mut failures, &gpu, &outliers, &case) {
            assert!(found.iter().all(|x| x.is_finite()), "{case}");
        }

        let Backward {
            mut problem,
            mut d_o,
            ..
        } = Backward::gaussian(shape, &mut rng);
        let neighbours = 400 * 2 * dims..600 * 2 * dims;
        for data in [&mut problem.v, &mut d_o] {
            data[neighbours.clone()]
                .iter_mut()
                .for_each(|x| scale(x, 1e4));
        }
        let large = Backward::new(problem, d_o);
        let case = format!("{head_dim:?}, a large document");
        if let Some(found) = check(&mut failures, &gpu, &large, &case) {
            let exact = large.on_cpu(Path::Reference);
            let cosine = cosine(&found[600 * 2 * dims..], &exact[600 * 2 * dims..]);
            let result = (cosine > 0.997).then_some(()).ok_or(format!("{cosine}"));
            failures.check(&format!("{case}, its neighbour"), result);
        }
    }
}
