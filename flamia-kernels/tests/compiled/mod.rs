//! What NVRTC makes of kernels, which takes no GPU.

use flamia_cuda::{Arch, Compiler, Program, Source};

/// Compiles a variant: no warning, nothing spilled, no products serialised.
pub fn without_spills(source: &Source, defines: &[(&str, String)], what: &str) {
    spilling_at_most(0, source, defines, what);
}

/// The same with this many bytes of registers spilled.
pub fn spilling_at_most(bytes: u32, source: &Source, defines: &[(&str, String)], what: &str) {
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
        .refuse_spills_over(bytes)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
}
