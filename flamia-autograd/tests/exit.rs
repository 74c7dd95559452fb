//! A whole program: it finds libtorch by itself, computes, and leaves without an abort.

use std::path::PathBuf;
use std::process::Command;

/// Examples lie beside the folder of the test binaries.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    profile.join("examples").join(name)
}

#[test]
fn the_example_exits_with_status_0() {
    let program = example("scaled_square");
    assert!(
        program.is_file(),
        "{} is missing; `cargo test` without --test builds the examples",
        program.display()
    );
    let output = Command::new(&program)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    assert_eq!(stderr, "");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "d(3 x^2)/dx at x = [1, 2] is [6.0, 12.0]\n"
    );
}
