//! Training on a GPU: steps that the host does not wait for, in BF16, on packed documents.
//! `cargo test -p flamia-train --test gpu -- --ignored` on a machine with an NVIDIA GPU.
#![cfg(feature = "torch")]

mod common;

use common::run::{Workplace, args, summary, train};
use flamia_train::error::{TrainError, chain};

const GPU: &str = "--device cuda:0 --model-head-dim 64 --steps 20 --optim-lr 1e-2";

#[test]
#[ignore = "needs a GPU"]
fn flash_in_bf16_learns_as_exact_attention_in_fp32_on_the_cpu() {
    let workplace = Workplace::new();
    let run = |name: &str, more: &str| {
        train(&args(&workplace.data, &workplace.run(name), more)).unwrap();
        summary(&workplace.run(name))
    };
    let cpu = run("cpu", "--model-head-dim 64 --steps 20 --optim-lr 1e-2");
    for (name, more) in [
        ("flash", "--attention flash"),
        (
            "flash, logged now and then",
            "--attention flash --log-every 7",
        ),
        ("sdpa", "--attention sdpa"),
        ("chunks", "--attention flash --compute-loss-chunk 50"),
    ] {
        let gpu = run(name, &format!("{GPU} {more}"));
        for loss in ["val_loss_first", "val_loss", "train_loss"] {
            let [gpu, cpu] = [&gpu, &cpu].map(|run| run[loss].as_f64().unwrap());
            println!("{name}, {loss}: {gpu} and {cpu} on the CPU");
            assert!((gpu - cpu).abs() < 0.03, "{name}, {loss}: {gpu} {cpu}");
        }
        assert!(gpu["step_tokens_per_s"].as_f64().unwrap() > 0.0);
        let settings = &gpu["settings"]["compute"];
        assert_eq!(settings["precision"], "auto");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_is_not_finite_is_left_out_and_told_when_the_step_is_looked_at() {
    let workplace = Workplace::new();
    let run = workplace.run("run");
    let flags =
        format!("{GPU} --attention flash --log-every 5 --eval-every 5 --guard-skip-limit 3");
    let flags = flags.replace("1e-2", "1e30");
    let error = train(&args(&workplace.data, &run, &flags)).unwrap_err();
    println!("{}", chain(&error));
    // The third in a row was step 4, which the host saw after step 5.
    assert!(
        matches!(
            error,
            TrainError::NotFinite {
                step: 4,
                in_a_row: 3,
                saved: 5
            }
        ),
        "{error}"
    );
    assert!(run.join("checkpoints/step-000005/MANIFEST.json").exists());
    assert!(run.join("spikes/step-000002.json").exists());
}

/// Steps go on while a checkpoint is written; its copy was made before them.
#[test]
#[ignore = "needs a GPU"]
fn a_run_resumed_from_a_checkpoint_written_in_the_background_goes_on_as_the_whole_one() {
    let workplace = Workplace::new();
    let flags = format!("{GPU} --attention sdpa --checkpoint-every 5 --checkpoint-keep 9");
    let run = workplace.run("run");
    train(&args(&workplace.data, &run, &flags)).unwrap();
    let whole = summary(&run);
    let pause = whole["checkpoint_pause_s"].as_f64().unwrap();
    println!("the longest pause was {pause:.4} s");
    for step in [10, 15, 20] {
        std::fs::remove_dir_all(run.join(format!("checkpoints/step-{step:06}"))).unwrap();
    }
    train(&args(&workplace.data, &run, &format!("{flags} --resume"))).unwrap();
    for loss in ["val_loss", "train_loss"] {
        let [resumed, whole] = [&summary(&run), &whole].map(|run| run[loss].as_f64().unwrap());
        println!("{loss}: {resumed} resumed, {whole} whole");
        assert!((resumed - whole).abs() < 1e-3, "{loss}: {resumed} {whole}");
    }
}
