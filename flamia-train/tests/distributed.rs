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
const RUN: &str = "--batch-rows 2 --batch-accumulate 2 --steps 8 --checkpoint-every 4 --checkpoint-keep 9";

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A rank, as a launcher starts it.
fn rank(workplace: &Workplace, name: &str, more: &str, rank: usize, world: usize, port: u16) -> Child {
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
            assert!((x - y).abs() <= 2e-4 * largest, "{name}: {x} and {y}, of {largest}");
        }
    }
}

fn assert_same_curves(a: &Path, b: &Path, steps: u64) {
    let [a, b] = [a, b].map(|run| read_curves(run, steps).unwrap());
    for tag in [TRAIN_LOSS, VAL_LOSS, "train/grad_norm", "train/tokens", "data/documents_per_row"] {
        let (a, b) = (&a[tag], &b[tag]);
        assert_eq!(a.len(), b.len(), "{tag}");
        assert!(!a.is_empty(), "{tag}");
        for ((step, a), (other, b)) in a.iter().zip(b) {
            assert_eq!(step, other, "{tag}");
            assert!((a - b).abs() <= 2e-5 * a.abs(), "{tag} at step {step}: {a} and {b}");
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
    let changing = workplace.run("changing");
    let upto = |steps: u64| format!("{} --optim-warmup 1", RUN.replace("--steps 8", &format!("--steps {steps}")));
    // The learning rate follows the number of steps: all of them from the start, stopped by checkpoints.
    let _ = upto;
    for (world, keep) in [(2, 4), (1, 8)] {
        let resume = if keep == 4 { "" } else { " --resume" };
        let said = train(&workplace, "changing", &format!("{RUN}{resume}"), world);
        if keep == 4 {
            // As if it had been killed after step 4.
            std::fs::remove_dir_all(changing.join("checkpoints/step-000008")).unwrap();
        } else {
            assert!(said.contains("after step 4"), "{said}");
        }
    }
    assert_same_tensors(&workplace.run("one"), &changing, 8);
    assert_same_curves(&workplace.run("one"), &changing, 8);
    std::fs::remove_dir_all(changing.join("checkpoints/step-000008")).unwrap();
    let said = train(&workplace, "changing", &format!("{RUN} --resume"), 4);
    assert!(said.contains("after step 4"), "{said}");
    assert_same_tensors(&workplace.run("one"), &changing, 8);
}
