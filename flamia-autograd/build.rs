//! Compiles the C++ shim against the headers of the same libtorch that torch-sys was built with.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=shim");

    let lib_dir = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB").map_err(
        |_| "torch-sys did not say where libtorch is; set LIBTORCH to the folder that holds libtorch's include/ and lib/",
    )?);
    let include_dir = include_dir(&lib_dir)?;

    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .include(&include_dir)
        .include(include_dir.join("torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", cxx11_abi().as_str())
        // torch's headers warn by the hundred, and the version check should be the only error.
        .warnings(false)
        .flag_if_supported("-Wfatal-errors")
        .files([
            "shim/distributed.cpp",
            "shim/function.cpp",
            "shim/leaf.cpp",
            "shim/optim.cpp",
            "shim/peers.cpp",
            "shim/stream.cpp",
        ])
        .compile("flamia_autograd_shim");

    // Tests and examples of this package find libtorch without LD_LIBRARY_PATH. Link arguments do
    // not reach the packages that depend on this one.
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib_dir.display());
    Ok(())
}

/// The folder that holds `torch/` and `ATen/`, found by the rules torch-sys uses for its own
/// headers; under LIBTORCH_USE_PYTORCH only the library folder is known, and both are neighbours.
fn include_dir(lib_dir: &Path) -> Result<PathBuf, String> {
    let from_python = variable("LIBTORCH_USE_PYTORCH").is_some();
    let root = if from_python {
        None
    } else {
        variable("LIBTORCH_INCLUDE")
            .or_else(|| variable("LIBTORCH_LIB").and_then(|_| variable("LIBTORCH")))
    };
    let root = match root {
        Some(root) => PathBuf::from(root),
        None => lib_dir.parent().unwrap_or(lib_dir).to_path_buf(),
    };

    let include_dir = root.join("include");
    let probe = include_dir.join("torch/csrc/autograd/custom_function.h");
    if probe.is_file() {
        Ok(include_dir)
    } else {
        Err(format!(
            "libtorch's headers are missing: no {}; set LIBTORCH (or LIBTORCH_INCLUDE) to the folder whose include/ holds them",
            probe.display()
        ))
    }
}

/// torch-sys compiles with LIBTORCH_CXX11_ABI, or 1; every torch 2.11 build uses the new ABI.
fn cxx11_abi() -> String {
    variable("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".to_owned())
}

fn variable(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok()
}
