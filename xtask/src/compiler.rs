//! The C++ compiler that tch's bindings and our shim are built with.

use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;

use crate::remedy;
use crate::surroundings::Surroundings;

/// A compiler that was seen to work.
#[derive(Debug)]
pub struct Compiler {
    /// As build scripts take it from CXX: a program, maybe with a wrapper before it.
    pub command: String,
    /// Its own first line about itself.
    pub version: String,
    /// Whether CXX must be set for build scripts, who only look for `c++`, to find it.
    pub needs_cxx: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum CompilerError {
    #[error(
        "no C++ compiler: neither c++, g++ nor clang++ is on PATH and CXX is not set.\n  To mend it: {remedy}"
    )]
    Missing { remedy: String },
    #[error(
        "CXX names {command:?}, which is not on PATH.\n  To mend it: unset CXX, or set it to a C++ compiler"
    )]
    CxxNotFound { command: String },
    #[error(
        "{command} cannot compile a C++17 program that includes <string>:\n{output}\n  To mend it: {remedy}"
    )]
    Broken {
        command: String,
        output: String,
        remedy: String,
    },
}

/// Standard library headers are a package of their own in places, so a version is not enough.
const TRIAL: &str = "#include <string>
int main() { if constexpr (sizeof(std::string) > 0) return 0; }
";

/// Finds the compiler as build scripts do, and has it check a small program.
pub fn find(here: &Surroundings) -> Result<Compiler, CompilerError> {
    let (command, needs_cxx) = match here.var("CXX") {
        Some(cxx) => (cxx.to_string_lossy().into_owned(), false),
        None => ["c++", "g++", "clang++"]
            .iter()
            .find(|name| here.find(name).is_some())
            .map(|name| ((*name).to_owned(), *name != "c++"))
            .ok_or_else(|| CompilerError::Missing {
                remedy: remedy::CXX_COMPILER.command(here),
            })?,
    };
    let not_found = || CompilerError::CxxNotFound {
        command: command.clone(),
    };
    let mut words = command.split_whitespace();
    let program = words
        .next()
        .and_then(|word| here.find(word))
        .ok_or_else(not_found)?;
    let leading: Vec<&str> = words.collect();

    let output = syntax_check(here, &program, &leading).map_err(|error| CompilerError::Broken {
        command: command.clone(),
        output: error.to_string(),
        remedy: remedy::CXX_COMPILER.command(here),
    })?;
    if !output.status.success() {
        return Err(CompilerError::Broken {
            output: String::from_utf8_lossy(&output.stderr)
                .trim_end()
                .to_owned(),
            remedy: remedy::CXX_COMPILER.command(here),
            command,
        });
    }
    let version = here
        .command(&program)
        .args(&leading)
        .arg("--version")
        .output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let version = version
        .unwrap_or_default()
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned();
    Ok(Compiler {
        command,
        version,
        needs_cxx,
    })
}

fn syntax_check(
    here: &Surroundings,
    program: &PathBuf,
    leading: &[&str],
) -> std::io::Result<std::process::Output> {
    let mut child = here
        .command(program)
        .args(leading)
        .args(["-std=c++17", "-fsyntax-only", "-x", "c++", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A compiler that quits without reading says why on standard error, which is shown.
        let _ = stdin.write_all(TRIAL.as_bytes());
    }
    child.wait_with_output()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::Machine;

    #[test]
    fn none_is_an_error_that_names_the_package() {
        let error = find(&Machine::bare().here()).unwrap_err();
        assert!(matches!(error, CompilerError::Missing { .. }));
        assert!(
            error
                .to_string()
                .contains(&remedy::CXX_COMPILER.command(&Machine::bare().here()))
        );
    }

    #[test]
    fn build_scripts_are_told_of_a_compiler_that_is_not_called_cxx() {
        let machine = Machine::bare();
        machine.script("g++", "echo 'g++ 14'");
        let compiler = find(&machine.here()).unwrap();
        assert_eq!(
            (compiler.command.as_str(), compiler.needs_cxx),
            ("g++", true)
        );
        assert_eq!(compiler.version, "g++ 14");
        machine.script("c++", "echo 'c++ 14'");
        let compiler = find(&machine.here()).unwrap();
        assert_eq!(
            (compiler.command.as_str(), compiler.needs_cxx),
            ("c++", false)
        );
    }

    #[test]
    fn cxx_wins_and_may_carry_a_wrapper() {
        let machine = Machine::bare();
        machine.script("c++", "echo wrong");
        machine.script("ccache", "echo \"wrapped $1\"");
        let compiler = find(&machine.here_with(&[("CXX", Path::new("ccache c++"))])).unwrap();
        assert_eq!(compiler.version, "wrapped c++");
        let error = find(&machine.here_with(&[("CXX", Path::new("icpx"))])).unwrap_err();
        assert!(
            matches!(error, CompilerError::CxxNotFound { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_compiler_without_its_headers_is_broken_in_its_own_words() {
        let machine = Machine::bare();
        machine.script(
            "c++",
            "echo 'fatal error: string: No such file' >&2; exit 1",
        );
        let error = find(&machine.here()).unwrap_err();
        assert!(matches!(error, CompilerError::Broken { .. }));
        assert!(error.to_string().contains("fatal error: string"), "{error}");
    }
}
