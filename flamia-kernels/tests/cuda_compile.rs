//! Every kernel compiles without a GPU, and none spills. NVRTC has to be there.

use flamia_cuda::{Arch, Compiler, Program, Source};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{self, Forms, Quantisation};
use flamia_kernels::cuda::retile::{self, Retiling};

fn check(source: &Source, defines: &[(&str, String)], what: &str) {
    let compiler = Compiler::shared().unwrap_or_else(|error| panic!("{error}"));
    let program = Program {
        source,
        defines,
        arch: Arch::Sm90a,
    };
    let cubin = compiler
        .compile(&program)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    for kernel in &cubin.kernels {
        println!("{what}: {kernel}");
    }
    assert!(!cubin.kernels.is_empty(), "{what} has no kernel");
    assert_eq!(cubin.warnings, [""; 0], "{what}");
    cubin
        .refuse_spills()
        .unwrap_or_else(|error| panic!("{what}: {error}"));
}

#[test]
fn quantisers_do_not_spill() {
    for quantisation in Quantisation::all() {
        let what = format!("{quantisation:?}");
        check(&quantise::SOURCE, &quantisation.defines(), &what);
    }
}

#[test]
fn retilers_do_not_spill() {
    for retiling in Retiling::all() {
        let what = format!("{retiling:?}");
        check(&retile::SOURCE, &retiling.defines(), &what);
    }
}

/// The struct that the host fills cannot drift from the kernel's.
#[test]
fn a_parameter_that_moved_does_not_compile() {
    let quantisation = Quantisation {
        head_dim: HeadDim::D128,
        hadamard: false,
        forms: Forms::Both,
    };
    let mut defines = quantisation.defines();
    let folds = defines.iter_mut().find(|(name, _)| *name == "OFFSET_folds");
    folds.expect("every field has an offset").1 = "40".to_owned();
    let compiler = Compiler::shared().unwrap_or_else(|error| panic!("{error}"));
    let program = Program {
        source: &quantise::SOURCE,
        defines: &defines,
        arch: Arch::Sm90a,
    };
    let error = compiler.compile(&program).unwrap_err().to_string();
    assert!(error.contains("Parameters::folds"), "{error}");
}
