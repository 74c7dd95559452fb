//! transformers loads what is exported, and computes what this model computes.
//!
//! `cargo xtask test --transformers` installs it and says in `TRANSFORMERS_PYTHON` which python has it.
#![cfg(feature = "torch")]

mod common;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::run::{Workplace, args, saved_tensors, train};
use common::{CAUSAL_SDPA, floats, pack};
use flamia_train::checkpoint::load_tensors;
use flamia_train::hugging_face::{ExportOptions, ExportType, export, import};
use flamia_train::model::{Model, Params, Precision};
use serde_json::{Value, json};
use tch::{Device, Kind};

const TEXT: &str = "a row  keeps\n\u{e9}t\u{e9} \u{20ac} <|end_of_text| apart";

/// The answer of transformers about `folder`.
fn ask(python: &OsString, folder: &Path, tokens: &[i64]) -> Value {
    let [question, answer] = ["question.json", "answer.json"].map(|name| folder.join(name));
    fs::write(
        &question,
        json!({"tokens": tokens, "text": TEXT}).to_string(),
    )
    .unwrap();
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracles/transformers_logits.py"))
        .args([folder, &question, &answer])
        .env("HF_HUB_OFFLINE", "1")
        // Its torch finds its own libraries, and must not find ours.
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    serde_json::from_slice(&fs::read(answer).unwrap()).unwrap()
}

fn numbers(logits: &Value) -> Vec<f64> {
    let rows = logits.as_array().unwrap().iter();
    rows.flat_map(|row| row.as_array().unwrap())
        .map(|x| x.as_f64().unwrap())
        .collect()
}

/// The root mean square of the difference, as a share of that of `b`.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

fn logits(model: &Model, tokens: &[i64]) -> Vec<f64> {
    let row = pack(&[tokens.to_vec()]);
    let logits = model
        .forward(&row.tokens, &row.positions, &row.documents, &CAUSAL_SDPA)
        .unwrap();
    floats(&logits.detach())
        .into_iter()
        .map(f64::from)
        .collect()
}

#[test]
fn transformers_computes_the_same_logits() {
    let Some(python) = std::env::var_os("TRANSFORMERS_PYTHON") else {
        eprintln!(
            "skipped: TRANSFORMERS_PYTHON names no python that has transformers; `cargo xtask test --transformers` installs one"
        );
        return;
    };
    let place = Workplace::new();
    // A generator's first numbers; any ids but the control tokens' do.
    let tokens: Vec<i64> = (0..56u32)
        .map(|i| i64::from(i.wrapping_mul(2_654_435_761) >> 24))
        .collect();
    for tied in [true, false] {
        let run = place.run(&format!("tied-{tied}"));
        let more = format!(
            "--steps 2 --eval-every 2 --model-heads 4 --model-kv-heads 2 --model-tied {tied} \
             --model-init-std 0.2 --model-rope-theta 5000"
        );
        train(&args(&place.data, &run, &more)).unwrap();
        for as_type in [ExportType::F32, ExportType::Bf16] {
            let folder = place.run(&format!("export-{tied}-{as_type}"));
            let options = ExportOptions {
                as_type,
                ..ExportOptions::default()
            };
            let config = export(&run, &folder, &options).unwrap().config;
            let answer = ask(&python, &folder, &tokens);
            assert_eq!(answer["type"], format!("torch.{}", as_type.torch()));
            assert_eq!(answer["unexpected"], json!([]));
            assert_eq!(answer["missing"], json!([]));
            let ids: Vec<u8> = TEXT.bytes().collect();
            assert_eq!(answer["ids"][0], 256);
            assert_eq!(json!(ids), json!(answer["ids"].as_array().unwrap()[1..]));
            assert_eq!(answer["decoded"], TEXT);
            assert_eq!((&answer["bos"], &answer["eos"]), (&json!(256), &json!(257)));

            let params = Params::init(&config.shape.parameters(0.0), 0, Device::Cpu).unwrap();
            let mut model = Model::new(config.shape, params);
            let targets = model
                .params
                .iter()
                .map(|(name, tensor)| (name.to_string(), tensor));
            let saved = run.join("checkpoints/step-000002/model.safetensors");
            load_tensors(targets, &saved).unwrap();
            if as_type == ExportType::Bf16 {
                model.precision = Precision::Bf16;
                let bf16 = distance(&logits(&model, &tokens), &numbers(&answer["logits"]));
                assert!(bf16 < 0.02, "{bf16}");
                tch::no_grad(|| {
                    for (_, weight) in model.params.iter_mut() {
                        let rounded = weight.to_kind(Kind::BFloat16);
                        weight.copy_(&rounded);
                    }
                });
                model.precision = Precision::Fp32;
            }
            let theirs = numbers(&answer["float32_logits"]);
            let fp32 = distance(&logits(&model, &tokens), &theirs);
            assert!(fp32 < 1e-5, "{fp32}");
        }

        // As transformers saves it, in shards, it is the same model.
        let again = place.run(&format!("export-{tied}-f32")).join("again");
        assert!(again.join("model.safetensors.index.json").exists());
        let back = place.run(&format!("back-{tied}"));
        let flags: Vec<OsString> = vec![
            "--data".into(),
            place.data.clone().into(),
            "--device".into(),
            "cpu".into(),
            "--threads".into(),
            "1".into(),
            "--batch-row-tokens".into(),
            "64".into(),
            "--eval-fraction".into(),
            "0.2".into(),
        ];
        import(&again, &back, &flags).unwrap();
        assert_eq!(saved_tensors(&back, 0)[0], saved_tensors(&run, 2)[0]);
    }
}
