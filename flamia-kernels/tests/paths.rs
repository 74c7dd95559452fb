//! Every path, mask, head dimension and option against exact attention.

mod common;

use common::*;
use flamia_kernels::{Mask, Options, Path};
use half::bf16;

/// Numerics contract, section 7: O and dQ at 4,096 tokens, head dimension 128. The contract gives
/// `nvfp4` from a model and `fp4`, whose details the paper leaves open, from the paper.
#[test]
fn four_bit_paths_have_the_cosines_of_the_contract() {
    let table = [
        (Path::Nvfp4, Mask::Causal, 0.9922, 0.9907, 0.001),
        (Path::Nvfp4, Mask::Full, 0.9894, 0.9892, 0.001),
        (Path::Fp4, Mask::Causal, 0.9810, 0.9456, 0.01),
        (Path::Fp4, Mask::Full, 0.9800, 0.9509, 0.01),
    ];
    for (path, mask, o, dq, bound) in table {
        let problem = Problem::gaussian(&[4096], [1, 1, 128], &mut rng(4096));
        let exact = compute::<f64>(&problem, &Options::new(Path::Reference, mask));
        let found = compute::<bf16>(&problem, &Options::new(path, mask));
        let cosines = std::array::from_fn::<f64, 4, _>(|i| {
            cosine(found.tensors()[i].1, exact.tensors()[i].1)
        });
        println!("{path} {mask}: O, dQ, dK, dV {cosines:.5?}");
        for (name, found, expected) in [("O", cosines[0], o), ("dQ", cosines[1], dq)] {
            assert!(
                (found - expected).abs() < bound,
                "{path} {mask}: {name} {found}, expected {expected}"
            );
        }
    }
}
