//! The command line of the workspace.
fn main() {}
