//! Several ranks of one program on this machine: started together, ended together.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};

use crate::process::{say, shown};

/// What a rank's exit code is when it was asked to stop and has saved.
const STOPPED: u8 = 130;

/// How long ranks have to end by themselves, once one has failed: they learn why from each other.
const GRACE: Duration = Duration::from_secs(10);

/// How often ranks are looked at.
const PULSE: Duration = Duration::from_millis(50);

/// Starts `world` ranks of what `command` makes, with the environment in which torchrun would start them, and
/// waits for all. Rank 0 has the terminal; lines of others are shown behind their number. Signals are passed
/// on to each. When a rank fails, all end, and its exit code is ours.
pub fn ranks(world: usize, command: impl Fn() -> Command) -> anyhow::Result<ExitCode> {
    let (signals, asked) = mpsc::channel();
    ctrlc::set_handler(move || {
        // Nobody listens once all ranks have ended.
        let _ = signals.send(());
    })
    .context("cannot listen to Ctrl-C")?;
    let ranks = Ranks::start(world, &command)?;
    Ok(ExitCode::from(supervise(ranks, &asked, GRACE)?))
}

/// Waits for all ranks, which `asked` has stopped; those that still run `grace` after a failure are killed.
/// Returns the exit code of the first that failed, else that of all.
fn supervise(mut ranks: Ranks, asked: &Receiver<()>, grace: Duration) -> anyhow::Result<u8> {
    let mut failure: Option<(u8, Instant)> = None;
    let mut code = 0;
    while !ranks.all_ended() {
        match asked.recv_timeout(PULSE) {
            Ok(()) => ranks.ask_to_stop(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(PULSE),
        }
        for (rank, status) in ranks.ended()? {
            match exit_code(status) {
                0 => {}
                STOPPED => code = STOPPED,
                failed if failure.is_none() => {
                    say(format_args!("rank {rank} ended with {status}, so all end"));
                    failure = Some((failed, Instant::now()));
                }
                _ => {}
            }
        }
        if failure.is_some_and(|(_, since)| since.elapsed() > grace) {
            ranks.kill()?;
        }
    }
    ranks.output_shown();
    Ok(failure.map_or(code, |(code, _)| code))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// The ranks that have been started; those that still run are killed with this value.
struct Ranks {
    running: Vec<(usize, Child)>,
    readers: Vec<thread::JoinHandle<()>>,
}

impl Ranks {
    fn start(world: usize, command: &impl Fn() -> Command) -> anyhow::Result<Self> {
        let port = free_port()?;
        let mut ranks = Self {
            running: Vec::new(),
            readers: Vec::new(),
        };
        let (lines, shown_lines) = mpsc::channel::<String>();
        for rank in 0..world {
            let mut command = command();
            describe(&mut command, rank, world, port);
            // A Ctrl-C on the terminal reaches us alone, and each rank once.
            command.process_group(0);
            if rank > 0 {
                command.stdin(Stdio::null());
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            let started = command.spawn();
            let mut child = started.with_context(|| format!("cannot run `{}`", shown(&command)))?;
            ranks.read(rank, child.stdout.take(), &lines);
            ranks.read(rank, child.stderr.take(), &lines);
            ranks.running.push((rank, child));
        }
        ranks.readers.push(thread::spawn(move || {
            for line in shown_lines {
                eprintln!("{line}");
            }
        }));
        Ok(ranks)
    }

    /// Shows what a rank writes, line by line.
    fn read(
        &mut self,
        rank: usize,
        output: Option<impl Read + Send + 'static>,
        lines: &Sender<String>,
    ) {
        let Some(output) = output else { return };
        let lines = lines.clone();
        self.readers.push(thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = Vec::new();
            while output
                .read_until(b'\n', &mut line)
                .is_ok_and(|bytes| bytes > 0)
            {
                let text = String::from_utf8_lossy(&line);
                let _ = lines.send(format!("[rank {rank}] {}", text.trim_end()));
                line.clear();
            }
        }));
    }

    /// Takes out those that have ended since the last call.
    fn ended(&mut self) -> anyhow::Result<Vec<(usize, ExitStatus)>> {
        let (mut ended, mut running) = (Vec::new(), Vec::new());
        for (rank, mut child) in self.running.drain(..) {
            match child.try_wait().context("cannot wait for a rank")? {
                Some(status) => ended.push((rank, status)),
                None => running.push((rank, child)),
            }
        }
        self.running = running;
        Ok(ended)
    }

    fn all_ended(&self) -> bool {
        self.running.is_empty()
    }

    fn ask_to_stop(&self) {
        for (_, child) in &self.running {
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // It may have ended meanwhile. SIGINT would be ignored by what was started in a background that does.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        self.running
            .iter_mut()
            .try_for_each(|(_, child)| child.kill())
            .context("cannot end a rank")
    }

    /// Waits until all that ranks wrote has been shown.
    fn output_shown(&mut self) {
        for reader in self.readers.drain(..) {
            // A panic there has been printed.
            let _ = reader.join();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // On an error of ours only; there is nobody left to tell another to.
        let _ = self.kill();
    }
}

/// Tells a program which rank it is.
fn describe(command: &mut Command, rank: usize, world: usize, port: u16) {
    for (name, value) in [
        ("RANK", rank),
        ("WORLD_SIZE", world),
        ("LOCAL_RANK", rank),
        ("LOCAL_WORLD_SIZE", world),
        ("MASTER_PORT", usize::from(port)),
    ] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1");
    // An outer launcher's store is not this one.
    command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
}

fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &'static str) -> impl Fn() -> Command {
        move || {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            command
        }
    }

    /// Waits for all ranks of a script and returns their exit codes, in the order of ranks.
    fn codes(world: usize, script: &'static str) -> Vec<u8> {
        let mut ranks = Ranks::start(world, &sh(script)).unwrap();
        let mut codes = vec![0; world];
        let deadline = Instant::now() + Duration::from_secs(30);
        while !ranks.all_ended() {
            assert!(Instant::now() < deadline, "they do not end");
            for (rank, status) in ranks.ended().unwrap() {
                codes[rank] = exit_code(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        ranks.output_shown();
        codes
    }

    #[test]
    fn each_rank_is_told_who_it_is() {
        let script = r#"
            [ "$WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR" = "3 3 127.0.0.1" ] || exit 99
            [ "$RANK" = "$LOCAL_RANK" ] && [ "$MASTER_PORT" -gt 0 ] || exit 98
            exit $((RANK + 10))"#;
        assert_eq!(codes(3, script), [10, 11, 12]);
        assert_eq!(codes(2, "kill -KILL $$"), [128 + 9; 2]);
    }

    #[test]
    fn all_can_be_asked_to_stop_and_killed() {
        let start = Instant::now();
        // The shells say that they listen.
        let folder = tempfile::tempdir().unwrap();
        let ready = folder.path().display().to_string();
        let command = |trap: &str| {
            let script = format!("{trap}; : > {ready}/$RANK; while :; do sleep 0.05; done");
            move || {
                let mut command = Command::new("/bin/sh");
                command.args(["-c", &script]);
                command
            }
        };
        let wait_until_ready = || {
            for rank in 0..2 {
                while !folder.path().join(rank.to_string()).exists() {
                    thread::sleep(Duration::from_millis(5));
                }
                std::fs::remove_file(folder.path().join(rank.to_string())).unwrap();
            }
        };
        let code_of = |mut ranks: Ranks| {
            let mut codes = Vec::new();
            while !ranks.all_ended() {
                let ended = ranks.ended().unwrap();
                codes.extend(ended.into_iter().map(|(_, status)| exit_code(status)));
                assert!(start.elapsed() < Duration::from_secs(60), "they do not end");
            }
            codes
        };

        let ranks = Ranks::start(2, &command("trap 'exit 130' TERM")).unwrap();
        wait_until_ready();
        ranks.ask_to_stop();
        assert_eq!(code_of(ranks), [STOPPED; 2]);

        let mut ranks = Ranks::start(2, &command("trap '' TERM")).unwrap();
        wait_until_ready();
        ranks.ask_to_stop();
        assert!(!ranks.all_ended());
        ranks.kill().unwrap();
        assert_eq!(code_of(ranks), [128 + 9; 2]);
    }

    #[test]
    fn one_that_fails_ends_the_others_with_its_code() {
        let code = |script: &'static str| {
            let (_asking, asked) = mpsc::channel();
            let ranks = Ranks::start(2, &sh(script)).unwrap();
            supervise(ranks, &asked, Duration::from_millis(100)).unwrap()
        };
        let start = Instant::now();
        assert_eq!(code("[ $RANK = 0 ] && exec sleep 100; exit 3"), 3);
        assert_eq!(code("[ $RANK = 1 ] && exec sleep 100; kill -TERM $$"), 143);
        assert!(start.elapsed() < Duration::from_secs(50));
        assert_eq!(code("exit 130"), STOPPED);
        assert_eq!(code("exit 0"), 0);
    }

    #[test]
    fn a_missing_program_is_named_and_leaves_no_rank() {
        let error = Ranks::start(2, &|| Command::new("/nowhere/trainer")).map(drop);
        assert!(error.unwrap_err().to_string().contains("trainer"));
    }
}
