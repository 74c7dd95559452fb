//! torch's own attention among the schemes.
#![cfg(feature = "torch")]

use flamia_kernels::Mask;
use flamia_probe::leakage::{Perturbation, measure};
use flamia_probe::metric::{cosine, relative_error};
use flamia_probe::{Problem, Tensor, attention, torch};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn problem() -> Problem {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    Problem::gaussian(&[50, 0, 33], [4, 2, 64], &mut rng).unwrap()
}

#[test]
fn its_results_are_those_of_exact_attention() {
    let problem = problem();
    let expected = attention::exact(&problem, Mask::Causal).unwrap();
    for mut scheme in torch::schemes() {
        let found = scheme.attend(&problem).unwrap();
        for (found, expected) in [
            (&found.o, &expected.o),
            (&found.dq, &expected.dq),
            (&found.dk, &expected.dk),
            (&found.dv, &expected.dv),
        ] {
            if scheme.name == "sdpa-f32" {
                assert!(relative_error(found, expected) < 1e-5);
            } else {
                assert!(cosine(found, expected) > 0.9998);
            }
        }
        assert!(found.lse.is_empty());
    }
}

#[test]
fn it_has_no_scales_to_leak_through() {
    let problem = problem();
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for mut scheme in torch::schemes() {
        for tensor in Tensor::ALL {
            let perturbation = Perturbation::random(&problem, tensor, 64.0, &mut rng).unwrap();
            let traces = measure(&problem, Mask::Causal, &perturbation, |problem| {
                scheme.attend(problem)
            })
            .unwrap();
            assert_eq!(traces.len(), 4, "every result but the LSE");
            for trace in traces {
                assert!(trace.change < 1e-6, "{} {tensor} {trace:?}", scheme.name);
            }
        }
    }
}
