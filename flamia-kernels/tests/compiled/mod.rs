//! What NVRTC makes of kernels, which takes no GPU.

use flamia_cuda::{Arch, Compiler, Program, Source};

/// Compiles a variant: no warning, and nothing spilled.
pub fn without_spills(source: &Source, defines: &[(&str, String)], what: &str) {
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
