//! Several ranks, as processes of the trainer's own program over Gloo, do what one does.
#![cfg(all(unix, feature = "torch"))]

mod common;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::run::{Workplace, args, checkpoints, summary};
use flamia_train::curves::{TRAIN_LOSS, VAL_LOSS, read_curves};
use safetensors::SafeTensors;

/// Four rows a step, of documents of many lengths.
const RUN: &str =
    "--batch-rows 2 --batch-accumulate 2 --steps 8 --checkpoint-every 4 --checkpoint-keep 9";

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A rank, as a launcher starts it.
fn rank(
    workplace: &Workplace,
    name: &str,
    more: &str,
    rank: usize,
    world: usize,
    port: u16,
) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flamia-train"));
    command
        .args(args(&workplace.data, &workplace.run(name), more))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
    let names = match rank % 2 {
        // What torchrun sets and what SLURM sets mean the same.
        0 => ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
        _ => ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
    };
    for (name, value) in names.into_iter().zip([rank, world, rank]) {
        command.env(name, value.to_string());
    }
    command.spawn().unwrap()
}

fn start(workplace: &Workplace, name: &str, more: &str, world: usize) -> Vec<Child> {
    let port = free_port();
    (0..world)
        .map(|number| rank(workplace, name, more, number, world, port))
        .collect()
}

fn ends(children: Vec<Child>) -> Vec<Output> {
    children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap())
        .collect()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs to the end and returns what rank 0 told.
fn train(workplace: &Workplace, name: &str, more: &str, world: usize) -> String {
    let outputs = ends(start(workplace, name, more, world));
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", told(output));
    }
    told(&outputs[0])
}

/// Every tensor of a checkpoint by name.
fn tensors(run: &Path, step: u64) -> Vec<(String, Vec<f32>)> {
    let folder = run.join(format!("checkpoints/step-{step:06}"));
    let mut found = Vec::new();
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let bytes = std::fs::read(folder.join(file)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let floats = view.data().chunks_exact(4);
            let floats = floats.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            found.push((name, floats.collect()));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// The largest difference of two checkpoints, tensor by tensor, in units of that tensor's largest value.
fn assert_same_tensors(a: &Path, b: &Path, step: u64) {
    let (a, b) = (tensors(a, step), tensors(b, step));
    assert_eq!(a.len(), b.len());
    for ((name, a), (other, b)) in a.iter().zip(&b) {
        assert_eq!(name, other);
        assert_eq!(a.len(), b.len(), "{name}");
        let largest = a.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        assert!(largest > 0.0, "{name} says nothing");
        for (x, y) in a.iter().zip(b) {
            assert!(
                (x - y).abs() <= 2e-4 * largest,
                "{name}: {x} and {y}, of {largest}"
            );
        }
    }
}

fn assert_same_curves(a: &Path, b: &Path, steps: u64) {
    let [a, b] = [a, b].map(|run| read_curves(run, steps).unwrap());
    for tag in [
        TRAIN_LOSS,
        VAL_LOSS,
        "train/grad_norm",
        "train/tokens",
        "data/documents_per_row",
    ] {
        let (a, b) = (&a[tag], &b[tag]);
        assert_eq!(a.len(), b.len(), "{tag}");
        assert!(!a.is_empty(), "{tag}");
        for ((step, a), (other, b)) in a.iter().zip(b) {
            assert_eq!(step, other, "{tag}");
            assert!(
                (a - b).abs() <= 2e-5 * a.abs(),
                "{tag} at step {step}: {a} and {b}"
            );
        }
    }
}

#[test]
fn any_number_of_ranks_trains_what_one_does() {
    let workplace = Workplace::new();
    train(&workplace, "one", RUN, 1);
    let one = workplace.run("one");
    // Buckets of a mebibyte hold this whole model; of less, several.
    for world in [2, 4] {
        let name = format!("{world} ranks");
        let more = format!("{RUN} --distributed-bucket-mib 1");
        let said = train(&workplace, &name, &more, world);
        assert!(said.contains(&format!("ranks: {world}, ")), "{said}");
        let many = workplace.run(&name);
        assert_same_curves(&one, &many, 8);
        assert_eq!(checkpoints(&one), checkpoints(&many));
        for step in [4, 8] {
            assert_same_tensors(&one, &many, step);
        }
        for value in ["tokens", "steps", "parameters", "data"] {
            assert_eq!(summary(&one)[value], summary(&many)[value], "{value}");
        }
        let bytes = |run: &Path| summary(run)["val_loss"].as_f64().unwrap();
        assert!((bytes(&one) - bytes(&many)).abs() < 1e-5);
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let workplace = Workplace::new();
    train(&workplace, "one", RUN, 1);
    let (one, changing) = (workplace.run("one"), workplace.run("changing"));
    // A finished run without its last checkpoint is one that was killed before that.
    let forget = || std::fs::remove_dir_all(changing.join("checkpoints/step-000008")).unwrap();
    train(&workplace, "changing", RUN, 2);
    for world in [1, 4, 2] {
        forget();
        let said = train(&workplace, "changing", &format!("{RUN} --resume"), world);
        assert!(said.contains("step-000004, after step 4"), "{said}");
        assert_same_tensors(&one, &changing, 8);
        assert_same_curves(&one, &changing, 8);
    }
}

/// A run that does not end by itself, and counts a rank as lost after two seconds and a half.
const ENDLESS: &str = "--steps 1000000 --optim-warmup 2 --checkpoint-every 2 --eval-every 1000000 \
    --log-every 100 --distributed-lost-after 2.5";

/// Waits until the run has saved twice more.
fn wait_for_checkpoints(run: &Path, ranks: &mut [Child]) {
    let newest = |run: &Path| {
        checkpoints(run)
            .into_iter()
            .filter(|c| c.starts_with("step-"))
            .max()
    };
    let start = Instant::now();
    for _ in 0..2 {
        let before = newest(run);
        while newest(run) == before {
            for rank in &mut *ranks {
                assert!(rank.try_wait().unwrap().is_none(), "it ended by itself");
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "no checkpoint in a minute"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// Waits until all have ended, a few seconds after a rank was lost.
fn ends_soon(mut ranks: Vec<Child>) -> Vec<Output> {
    let start = Instant::now();
    while ranks
        .iter_mut()
        .any(|rank| rank.try_wait().unwrap().is_none())
    {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "they go on without it"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    ends(ranks)
}

#[test]
fn a_killed_rank_ends_the_others_with_its_name_and_the_run_goes_on() {
    let workplace = Workplace::new();
    let run = workplace.run("killed");
    // Killed, the system closes its connections; stopped, it just does not answer.
    for (kill, lost, resume) in [
        ("-KILL", 1, ""),
        ("-KILL", 0, " --resume"),
        ("-STOP", 2, " --resume"),
    ] {
        let more = format!("{ENDLESS}{resume} --batch-accumulate 3");
        let mut ranks = start(&workplace, "killed", &more, 3);
        wait_for_checkpoints(&run, &mut ranks);
        // Long enough for a sign of life that tells of a step.
        std::thread::sleep(Duration::from_millis(500));
        signal(&ranks[lost], kill);
        let mut gone = ranks.remove(lost);
        let outputs = ends_soon(ranks);
        gone.kill().unwrap();
        gone.wait().unwrap();
        for output in &outputs {
            let told = told(output);
            assert_eq!(output.status.code(), Some(1), "{kill} {lost}: {told}");
            let named = format!("error: rank {lost} is lost");
            assert!(
                told.contains(&named) && told.contains("--resume"),
                "{kill} {lost}: {told}"
            );
            if lost != 0 {
                assert!(
                    told.contains("the last from step ") || told.contains("the last from saving"),
                    "{told}"
                );
            }
        }
    }
    // One process takes the run up, to an end that has come meanwhile.
    let newest = checkpoints(&run)
        .into_iter()
        .filter(|c| c.starts_with("step-"))
        .max()
        .unwrap();
    let step: u64 = newest.trim_start_matches("step-").parse().unwrap();
    let more = ENDLESS.replace("1000000 --optim", &format!("{} --optim", step + 2));
    let said = train(
        &workplace,
        "killed",
        &format!("{more} --batch-accumulate 3 --resume"),
        1,
    );
    assert!(said.contains("resumed from"), "{said}");
}

#[test]
fn a_signal_to_one_rank_stops_all_after_the_same_step() {
    let workplace = Workplace::new();
    let run = workplace.run("stopped");
    let mut ranks = start(&workplace, "stopped", ENDLESS, 2);
    wait_for_checkpoints(&run, &mut ranks);
    signal(&ranks[1], "-TERM");
    for output in ends_soon(ranks) {
        assert_eq!(output.status.code(), Some(130), "{}", told(&output));
    }
    let steps = summary(&run)["steps"].as_u64().unwrap();
    assert!(run.join(format!("checkpoints/step-{steps:06}")).exists());
}

#[test]
fn ranks_that_do_not_agree_do_not_train() {
    let workplace = Workplace::new();
    let port = free_port();
    let first = rank(&workplace, "run", "--steps 2", 0, 2, port);
    let second = rank(&workplace, "run", "--steps 2 --optim-lr 0.5", 1, 2, port);
    let outputs = ends_soon(vec![first, second]);
    for output in &outputs {
        let told = told(output);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains("rank 1 has other settings than rank 0"),
            "{told}"
        );
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let workplace = Workplace::new();
    let alone = rank(
        &workplace,
        "run",
        "--distributed-patience 0.5",
        0,
        2,
        free_port(),
    );
    let output = &ends_soon(vec![alone])[0];
    let told = told(output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(
        told.contains("waited 0.5 s for rank 1, which has not come"),
        "{told}"
    );
}

/// NCCL. `cargo test -p flamia-train --test distributed -- --ignored` on a machine with two NVIDIA GPUs.
#[test]
#[ignore = "needs two GPUs"]
fn two_gpus_train_what_one_does() {
    let workplace = Workplace::new();
    let more = format!("{RUN} --device auto --attention flash --model-head-dim 64");
    train(&workplace, "one", &more, 1);
    train(&workplace, "two", &more, 2);
    let [one, two] = ["one", "two"].map(|name| read_curves(&workplace.run(name), 8).unwrap());
    for tag in [TRAIN_LOSS, VAL_LOSS] {
        for ((step, a), (_, b)) in one[tag].iter().zip(&two[tag]) {
            // Products are in BF16, and micro-batches are others.
            assert!((a - b).abs() < 0.02, "{tag} at step {step}: {a} and {b}");
        }
    }
}
