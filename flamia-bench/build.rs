//! Writes libtorch's folder into the binary's run path.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Set only when torch-sys is built in; link arguments do not travel from there to here.
    let unix = std::env::var_os("CARGO_CFG_UNIX").is_some();
    if let Some(folder) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").filter(|_| unix) {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}
