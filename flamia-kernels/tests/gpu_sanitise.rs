//! Small whole calls, every variant of the kernels once, to be watched by compute-sanitizer:
//! `compute-sanitizer --tool memcheck --report-api-errors no BINARY --ignored`, and the same with
//! `racecheck`. (A launch asks the driver for one parameter too many, to see how many there are.)
//!
//! Scratch ends with the last document, so that memcheck sees a tile that is copied whole. The calls are
//! checked too: a sanitizer that changes what is computed watches something else.
//!
//! Racecheck lets an arrival at an mbarrier free what the arriving thread itself has read. In a ring of two
//! stages and nothing else, releases 2025.3 and 2026.4 report all reads of lanes that leave it to one of
//! them, also after `__syncwarp`, and none if every thread arrives, which costs 32 arrivals for one. 2026.4
//! follows MMAs, which keep the warps of a warpgroup together. So its reports of reads of the work item, or
//! an older one's of scales, by a warp that arrives after them are not about the order.

mod attention;
mod common;
mod quantised;
mod whole_call;

use attention::{Problem, Shape};
use common::cosine;
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use whole_call::{Call, kernels};

#[test]
#[ignore = "needs a GPU"]
fn small_calls() {
    let kernels = kernels();
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    // Items of 128 rows and of 192; a document that ends in the first block of a tile comes last.
    for lengths in [vec![5, 0, 70, 33, 129], vec![1], vec![450, 517]] {
        for head_dim in [HeadDim::D128, HeadDim::D64] {
            for mask in [Mask::Causal, Mask::Full, Mask::window(100)] {
                let shape = Shape {
                    lengths: lengths.clone(),
                    heads: 4,
                    kv_heads: 2,
                    head_dim,
                    mask,
                };
                let case = format!("{shape:?}");
                let problem = Problem::gaussian(shape, &mut rng);
                let call = Call::new(&kernels, &problem, problem.documents.len() + 1);
                call.run(&kernels);
                let found = call.raw();
                assert!(found.is_whole(), "{case}");
                let similarity = cosine(&found.widened().o, &problem.on_cpu(Path::Mxfp8).o);
                assert!(similarity > 0.99999, "{case}: {similarity}");
            }
        }
    }
}
