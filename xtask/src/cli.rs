//! What can be asked of `cargo xtask`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Train, test and look after the workspace. What is missing is set up on the way.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub struct Cli {
    #[command(subcommand)]
    pub task: Task,
}

#[derive(Subcommand)]
pub enum Task {
    /// Train a Llama on packed documents (`cargo xtask train --help` lists the settings)
    // The trainer owns its command line, `--help` included.
    #[command(disable_help_flag = true)]
    Train {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Measure a checkpoint's validation loss, and whether its attention leaks (`cargo xtask eval --help`)
    #[command(disable_help_flag = true)]
    Eval {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Let a checkpoint write on (`cargo xtask generate --help`)
    #[command(disable_help_flag = true)]
    Generate {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Write a checkpoint as a Hugging Face folder, which transformers loads (`cargo xtask export --help`)
    // Its program owns its command line, `--help` included; so does that of `import`.
    #[command(disable_help_flag = true)]
    Export {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Make a run of a Hugging Face Llama folder (`cargo xtask import --help`)
    #[command(disable_help_flag = true)]
    Import {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Show runs side by side as an HTML page (`cargo xtask report --help`)
    #[command(disable_help_flag = true)]
    Report {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Prepare token caches, and look into them (`cargo xtask data --help` lists what there is)
    // Its program owns its command line, `--help` included.
    #[command(disable_help_flag = true)]
    Data {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// See what low-bit attention does (`cargo xtask probe --help` lists the probes)
    // Each probe owns its command line, `--help` included.
    #[command(disable_help_flag = true)]
    Probe {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Measure how fast attention is (`cargo xtask bench --help` lists the devices)
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// See how schedules of packed documents keep GPUs busy (`cargo xtask sched --help` lists what
    /// there is)
    #[command(disable_help_flag = true)]
    Sched {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run every test of the workspace
    Test {
        /// Also hold exported models against transformers, installed with a torch of its own (2.9 GB)
        /// under target/, or taken from the python that TRANSFORMERS_PYTHON names
        #[arg(long)]
        transformers: bool,
        /// Passed on to `cargo test`
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Check formatting and run clippy with warnings denied
    Lint,
    /// Say what was found on this machine, and what mends what is missing
    Doctor {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Print shell exports that let plain cargo and rust-analyzer find libtorch
    ///
    /// Use it as `eval "$(cargo xtask env)"`.
    Env,
    /// Run cargo with libtorch's environment, as in `cargo xtask cargo -- build --release`
    Cargo {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Start TensorBoard on the runs
    Tensorboard {
        /// The folder that holds the runs
        #[arg(long, default_value = "runs")]
        logdir: PathBuf,
        /// Install TensorBoard into an environment of its own under target/
        #[arg(long)]
        install: bool,
        /// Passed on to TensorBoard, as in `-- --port 6007`
        #[arg(last = true)]
        args: Vec<OsString>,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn passed_on(task: &str, line: &[&str]) -> Vec<OsString> {
        let line = ["cargo xtask", task]
            .into_iter()
            .chain(line.iter().copied());
        match Cli::try_parse_from(line).unwrap().task {
            Task::Train { args }
            | Task::Eval { args }
            | Task::Generate { args }
            | Task::Export { args }
            | Task::Import { args }
            | Task::Report { args }
            | Task::Probe { args }
            | Task::Bench { args }
            | Task::Sched { args } => args,
            _ => panic!("not parsed as {task}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn other_programs_get_their_arguments_untouched() {
        for line in [
            &["--help"][..],
            &["-h"],
            &["--steps", "10", "--out", "runs/a"],
            &["--no-such-flag=3", "positional", "--", "--after"],
            &[],
        ] {
            for task in [
                "train", "eval", "generate", "export", "import", "report", "probe", "bench",
                "sched",
            ] {
                assert_eq!(passed_on(task, line), line, "{task} {line:?}");
            }
        }
    }

    #[test]
    fn the_datasets_program_gets_its_arguments_untouched() {
        let line = ["cargo xtask", "data", "prepare", "--data", "a", "-h"];
        let Task::Data { args } = Cli::try_parse_from(line).unwrap().task else {
            panic!("not parsed as data");
        };
        assert_eq!(args, &line[2..]);
    }

    #[test]
    fn cargo_gets_its_arguments_with_and_without_dashes() {
        for line in [
            &["cargo", "build", "--release"][..],
            &["cargo", "--", "build", "--release"],
        ] {
            let line = ["cargo xtask"].iter().chain(line);
            let Task::Cargo { args } = Cli::try_parse_from(line).unwrap().task else {
                panic!("not parsed as cargo");
            };
            assert_eq!(args, ["build", "--release"]);
        }
    }
}
