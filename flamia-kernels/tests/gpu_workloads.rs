//! The nine workloads of the paper's section 4.1 on a GPU, causal and full: against the CPU's `hopper`
//! profile and against exact attention, and twice for the same bits.

mod attention;
mod common;
mod quantised;
mod whole_call;

use std::time::Instant;

use attention::{Outputs, Problem, Shape};
use common::cosine;
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use flamia_sched::workloads::WORKLOADS;
use rayon::prelude::*;
use whole_call::{Call, Part, cut, kernels, pooled};

/// Rows that are compared with the profile. Its accumulator, bit for bit, takes a CPU of 16 cores four
/// seconds for a document of 4096 rows under the full mask.
const CAUSAL_ROWS: usize = 1024;
const FULL_ROWS: usize = 4096;

/// What one query head of a document has to be.
struct Sample {
    case: String,
    problem: Problem,
    found: Outputs,
}

/// What the CPU makes of a sample.
struct Verdict {
    told: String,
    is_sound: bool,
    compares_the_profile: bool,
}

impl Sample {
    fn judge(&self) -> Verdict {
        let exact = cosine(&self.found.o, &self.problem.on_cpu(Path::Reference).o);
        let profile = self.profile();
        let told = format!(
            "{}: exact {exact:.6}, profile {}",
            self.case,
            profile.map_or("-".to_owned(), |x| format!("1 - {:.1e}", 1.0 - x))
        );
        Verdict {
            told,
            // The profile by itself has 0.9985 to 0.9990 here.
            is_sound: exact > 0.9984 && profile.is_none_or(|x| x > 0.99999),
            compares_the_profile: profile.is_some(),
        }
    }

    /// The cosine to the profile. Of a long causal document, the first rows, which see no other.
    fn profile(&self) -> Option<f64> {
        let len = self.problem.tokens();
        let rows = match self.problem.shape.mask.is_causal() {
            true => len.min(CAUSAL_ROWS),
            false if len <= FULL_ROWS => len,
            false => return None,
        };
        let wanted = cut(&self.problem, 0..rows).on_cpu(Path::Mxfp8);
        let dims = self.problem.shape.head_dim.get();
        Some(cosine(&self.found.o[..rows * dims], &wanted.o))
    }
}

/// The longest document, and the shortest if others are longer, each for another head.
fn parts(problem: &Problem) -> Vec<Part> {
    let lengths = &problem.shape.lengths;
    let by_length = |document: &usize| lengths[*document];
    let longest = (0..lengths.len()).max_by_key(by_length).unwrap();
    let shortest = (0..lengths.len()).min_by_key(by_length).unwrap();
    let last_head = problem.shape.heads - 1;
    let mut parts = vec![(longest, last_head)];
    if lengths[shortest] < lengths[longest] {
        parts.push((shortest, 7));
    }
    let part = |(document, head)| Part { document, head };
    parts.into_iter().map(part).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn workloads_are_near_the_profile_and_exact_attention() {
    let kernels = kernels();
    let start = Instant::now();
    let mut samples = Vec::new();
    for workload in &WORKLOADS {
        let shape = Shape {
            lengths: workload.lengths.to_vec(),
            heads: workload.heads,
            kv_heads: workload.kv_heads,
            head_dim: HeadDim::D128,
            mask: Mask::Causal,
        };
        let mut problem = pooled(shape, 1);
        for mask in [Mask::Causal, Mask::Full] {
            problem.shape.mask = mask;
            let run = || {
                let call = Call::new(&kernels, &problem, problem.documents.len() + 1);
                call.run(&kernels);
                call.raw()
            };
            let (found, again) = (run(), run());
            assert!(found.is_whole(), "{} {mask}", workload.name);
            assert!(found.is_bitwise(&again), "{} {mask}", workload.name);
            samples.extend(parts(&problem).into_iter().map(|part| Sample {
                case: format!("{} {mask} {part:?}", workload.name),
                problem: part.of(&problem),
                found: found.part(&problem, part),
            }));
        }
    }
    println!("on the GPU: {:.1} s", start.elapsed().as_secs_f64());
    let verdicts: Vec<_> = samples.par_iter().map(Sample::judge).collect();
    println!("and the CPU: {:.1} s", start.elapsed().as_secs_f64());
    verdicts.iter().for_each(|v| println!("{}", v.told));
    let wrong: Vec<_> = verdicts.iter().filter(|v| !v.is_sound).collect();
    assert!(wrong.is_empty(), "{} of {}", wrong.len(), verdicts.len());
    // Only the longest documents of the full mask are too long for the CPU.
    let compared = verdicts.iter().filter(|v| v.compares_the_profile).count();
    assert!(compared >= verdicts.len() - 5, "{compared}");
}
