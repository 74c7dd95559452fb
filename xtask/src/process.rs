//! Running what the user should see run.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context;

/// One line about a step, on standard error, so that standard output stays the command's own.
pub fn say(line: impl std::fmt::Display) {
    eprintln!("xtask: {line}");
}

/// The command as one would type it, its program by name alone.
pub fn shown(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    std::iter::once(program)
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Says what is run, runs it on our own terminal, and returns its exit code (128 + signal where a
/// signal ended it).
pub fn run(command: &mut Command) -> anyhow::Result<u8> {
    let line = shown(command);
    say(&line);
    let status = command
        .status()
        .with_context(|| format!("cannot run `{line}`"))?;
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Becomes the command: a Ctrl-C reaches it once, and its exit code is ours. Returns on failure
/// only.
pub fn become_command(command: &mut Command) -> anyhow::Result<ExitCode> {
    let error = command.exec();
    Err(error).with_context(|| format!("cannot run `{}`", shown(command)))
}

/// A duration as a person says it: `7.3 s`, `3 min 05 s`.
pub fn spoken(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", duration.as_secs_f64()),
        _ => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_passed_on() {
        let sh = |script: &str| run(Command::new("/bin/sh").args(["-c", script])).unwrap();
        assert_eq!(sh("exit 0"), 0);
        assert_eq!(sh("exit 101"), 101);
        assert_eq!(sh("kill -TERM $$"), 128 + 15);
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = run(&mut Command::new("/nowhere/cargo")).unwrap_err();
        assert!(error.to_string().contains("cargo"), "{error}");
    }

    #[test]
    fn durations() {
        assert_eq!(spoken(Duration::from_millis(7_310)), "7.3 s");
        assert_eq!(spoken(Duration::from_secs(185)), "3 min 05 s");
    }
}
