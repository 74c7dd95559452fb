//! Hugging Face folders, written and read.
#![cfg(feature = "torch")]

mod common;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use common::floats;
use common::run::{Workplace, args, checkpoints, saved_tensors, summary, train};
use flamia_train::checkpoint::CheckpointError;
use flamia_train::hugging_face::{
    ExportOptions, ExportType, HuggingFaceError, Imported, byte_tokenizer, export, import,
};
use flamia_train::run_folder::RunFolderError;
use flamia_train::trainer::Outcome;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

const F32: ExportOptions = ExportOptions {
    as_type: ExportType::F32,
    force: false,
    tokenizer: None,
};

/// A run of two steps.
fn trained(place: &Workplace, name: &str, more: &str) -> PathBuf {
    let run = place.run(name);
    let more = format!("--steps 2 {more}");
    assert_eq!(
        train(&args(&place.data, &run, &more)).unwrap(),
        Outcome::Finished
    );
    run
}

/// The flags of a tiny run that an import takes: all but those about the model.
fn flags(place: &Workplace) -> Vec<OsString> {
    let all = args(&place.data, Path::new("unused"), "");
    let mut kept = Vec::new();
    for pair in all.chunks(2) {
        let flag = pair[0].to_string_lossy();
        if !flag.starts_with("--model") && flag != "--out" {
            kept.extend_from_slice(pair);
        }
    }
    kept
}

fn imported(place: &Workplace, from: &Path, name: &str) -> Result<Imported, HuggingFaceError> {
    import(from, &place.run(name), &flags(place))
}

/// The tensors of a file: name, type, shape, bytes.
type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let views = file.tensors().into_iter();
    views
        .map(|(name, view)| {
            (
                name,
                view.dtype(),
                view.shape().to_vec(),
                view.data().to_vec(),
            )
        })
        .collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(path, serialize(views, None::<HashMap<_, _>>).unwrap()).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn an_export_imports_to_the_same_bits_and_trains_on() {
    let place = Workplace::new();
    for tied in [true, false] {
        let name = |what: &str| format!("{what}-{tied}");
        let run = trained(&place, &name("run"), &format!("--model-tied {tied}"));
        let folder = place.run(&name("export"));
        let exported = export(&run, &folder, &F32).unwrap();
        assert_eq!(exported.step, 2);
        assert_eq!(
            names(&folder),
            [
                "README.md",
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        let [weights, config] = ["model.safetensors", "config.json"]
            .map(|name| fs::metadata(folder.join(name)).unwrap().permissions());
        assert_eq!(weights, config);
        let head = read(&folder.join("model.safetensors"))
            .iter()
            .any(|(name, ..)| name == "lm_head.weight");
        assert_eq!(head, !tied);

        let imported = imported(&place, &folder, &name("back")).unwrap();
        assert_eq!(imported.notes, [""; 0]);
        let back = place.run(&name("back"));
        assert_eq!(checkpoints(&back), ["step-000000"]);
        assert_eq!(saved_tensors(&back, 0)[0], saved_tensors(&run, 2)[0]);

        // It goes on from there, so that its first loss is the other's last.
        let resume = ["--resume", "--steps", "3", "--out"].map(OsString::from);
        let resume = [&resume[..], &[back.clone().into()]].concat();
        assert_eq!(train(&resume).unwrap(), Outcome::Finished);
        let first = summary(&back)["val_loss_first"].clone();
        assert!(first.is_number(), "{first}");
        assert_eq!(first, summary(&run)["val_loss"]);
        assert_ne!(saved_tensors(&back, 3)[0], saved_tensors(&run, 2)[0]);
    }
}

#[test]
fn weights_are_rounded_to_bf16_as_torch_does() {
    let place = Workplace::new();
    let run = trained(&place, "run", "");
    let folder = place.run("export");
    export(&run, &folder, &ExportOptions::default()).unwrap();
    let saved = run.join("checkpoints/step-000002/model.safetensors");
    let trained: HashMap<String, Vec<u8>> = read(&saved)
        .into_iter()
        .map(|(name, _, _, bytes)| (name, bytes))
        .collect();
    let values = |bytes: &[u8]| {
        let values: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        Tensor::from_slice(&values)
    };
    for (name, dtype, _, bytes) in read(&folder.join("model.safetensors")) {
        assert_eq!(dtype, Dtype::BF16);
        let rounded = values(&trained[&name]).to_kind(Kind::BFloat16);
        // BF16 is the upper half of F32.
        let widened: Vec<u8> = bytes
            .chunks_exact(2)
            .flat_map(|b| [0, 0, b[0], b[1]])
            .collect();
        assert_eq!(
            floats(&values(&widened)),
            floats(&rounded.to_kind(Kind::Float)),
            "{name}"
        );
    }
    imported(&place, &folder, "back").unwrap();
    let config: Value =
        serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
}

#[test]
fn shards_and_half_precision_are_read() {
    let place = Workplace::new();
    let run = trained(&place, "run", "");
    let folder = place.run("export");
    export(&run, &folder, &F32).unwrap();
    let whole = folder.join("model.safetensors");
    let tensors = read(&whole);
    fs::remove_file(&whole).unwrap();
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(5).enumerate() {
        let file = format!("model-{i}.safetensors");
        write(&folder.join(&file), &part.to_vec());
        for (name, ..) in part {
            map.insert(name.clone(), json!(file));
        }
    }
    let index = folder.join("model.safetensors.index.json");
    fs::write(
        &index,
        json!({"metadata": {}, "weight_map": map}).to_string(),
    )
    .unwrap();
    imported(&place, &folder, "back").unwrap();
    assert_eq!(
        saved_tensors(&place.run("back"), 0)[0],
        saved_tensors(&run, 2)[0]
    );

    // 1.5 in F16, 1 sign, 5 exponent, 10 fraction bits.
    let halves: Tensors = tensors
        .iter()
        .map(|(name, _, shape, bytes)| {
            let ones = [0x00, 0x3e].repeat(bytes.len() / 4);
            (name.clone(), Dtype::F16, shape.clone(), ones)
        })
        .collect();
    write(&whole, &halves);
    imported(&place, &folder, "halves").unwrap();
    let saved = place.run("halves/checkpoints/step-000000/model.safetensors");
    for (name, dtype, _, bytes) in read(&saved) {
        assert_eq!(dtype, Dtype::F32);
        let all = bytes.chunks_exact(4).all(|b| b == 1.5f32.to_le_bytes());
        assert!(all, "{name}");
    }

    fs::remove_file(&whole).unwrap();
    for outside in ["../model-0.safetensors", "/etc/passwd", ".."] {
        map.insert("model.norm.weight".into(), json!(outside));
        fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
        let error = imported(&place, &folder, "outside").unwrap_err();
        assert!(
            matches!(&error, HuggingFaceError::Entry { key, .. } if key == "weight_map"),
            "{error}"
        );
    }
}

#[test]
fn a_tokenizer_goes_along_unchanged() {
    let place = Workplace::new();
    // The byte-level one with an id more is one of its own.
    let mut json = byte_tokenizer();
    let mut extra = json["added_tokens"][2].clone();
    (extra["id"], extra["content"]) = (json!(259), json!("<|more|>"));
    json["added_tokens"].as_array_mut().unwrap().push(extra);
    let file = place.run("own.json");
    fs::write(&file, format!("{json:#}")).unwrap();
    let run = trained(&place, "run", &format!("--tokenizer {}", file.display()));

    let folder = place.run("export");
    export(&run, &folder, &F32).unwrap();
    let same = |copy: &Path| assert_eq!(fs::read(copy).unwrap(), fs::read(&file).unwrap());
    same(&folder.join("tokenizer.json"));
    let config: Value =
        serde_json::from_slice(&fs::read(folder.join("tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!(config["bos_token"], "<|begin_of_text|>");
    assert_eq!(config["eos_token"], "<|end_of_text|>");
    imported(&place, &folder, "back").unwrap();
    same(&place.run("back/tokenizer.json"));
    assert_eq!(
        saved_tensors(&place.run("back"), 0)[0],
        saved_tensors(&run, 2)[0]
    );
    // The run has its own copy.
    export(&place.run("back"), &place.run("again"), &F32).unwrap();
    same(&place.run("again/tokenizer.json"));

    let moved = place.run("moved.json");
    fs::copy(&file, &moved).unwrap();
    fs::write(&file, "{}").unwrap();
    let error = export(&run, &place.run("lost"), &F32).unwrap_err();
    assert!(error.to_string().contains("own.json"), "{error}");
    let options = ExportOptions {
        tokenizer: Some(moved),
        ..F32
    };
    export(&run, &place.run("found"), &options).unwrap();
}

#[test]
fn an_export_replaces_nothing_unasked() {
    let place = Workplace::new();
    let run = trained(&place, "run", "");
    let force = ExportOptions { force: true, ..F32 };
    let folder = place.run("deep/export");
    export(&run.join("checkpoints/step-000002"), &folder, &F32).unwrap();
    fs::write(folder.join("mine"), "").unwrap();
    assert!(matches!(
        export(&run, &folder, &F32),
        Err(HuggingFaceError::Exists { .. })
    ));
    assert!(folder.join("mine").exists());
    export(&run, &folder, &force).unwrap();
    assert!(!folder.join("mine").exists());
    let error = export(&run, &run, &force).unwrap_err();
    assert!(
        matches!(error, HuggingFaceError::NotReplaced { .. }),
        "{error}"
    );

    let damaged = run.join("checkpoints/step-000002/model.safetensors");
    fs::write(&damaged, "").unwrap();
    for from in [&run, &run.join("checkpoints/step-000002")] {
        let error = export(from, &folder, &force).unwrap_err();
        assert!(matches!(error, HuggingFaceError::Checkpoint(_)), "{error}");
        assert!(error.to_string().contains("bytes instead of"), "{error}");
    }
    let error = export(&place.run("deep"), &place.run("new"), &F32).unwrap_err();
    assert!(matches!(error, HuggingFaceError::NoRun { .. }), "{error}");
    assert!(!place.run("new").exists());
    assert_eq!(
        names(&place.run("deep")),
        ["export"],
        "nothing is left over"
    );
}

#[test]
fn what_does_not_fit_is_not_imported() {
    let place = Workplace::new();
    let run = trained(&place, "run", "");
    let folder = place.run("export");
    export(&run, &folder, &F32).unwrap();
    let occupied = imported(&place, &folder, "run").unwrap_err();
    assert!(
        matches!(
            occupied,
            HuggingFaceError::RunFolder(RunFolderError::Occupied { .. })
        ),
        "{occupied}"
    );
    for flag in ["--model-dim", "--out=x", "--resume"] {
        let given = [&flags(&place)[..], &[flag.into()]].concat();
        let error = import(&folder, &place.run("back"), &given).unwrap_err();
        assert!(matches!(error, HuggingFaceError::Fixed { .. }), "{error}");
    }

    let path = folder.join("model.safetensors");
    let whole = read(&path);
    let norm = whole
        .iter()
        .position(|(name, ..)| name == "model.norm.weight");
    let norm = norm.unwrap();
    let change = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = whole.clone();
        change(&mut tensors);
        write(&path, &tensors);
        let error = imported(&place, &folder, "back").unwrap_err();
        assert!(
            matches!(
                error,
                HuggingFaceError::Checkpoint(CheckpointError::Mismatch { .. })
            ),
            "{error}"
        );
        error.to_string()
    };
    let bias = "model.layers.0.self_attn.q_proj.bias";
    let told = change(&|tensors| {
        tensors.push((bias.into(), Dtype::F32, vec![1], vec![0; 4]));
    });
    assert!(
        told.contains(&format!("{bias} is not part of the model")),
        "{told}"
    );
    let told = change(&|tensors| drop(tensors.remove(norm)));
    assert!(told.contains("model.norm.weight is missing"), "{told}");
    let told = change(&|tensors| tensors[norm].2 = vec![4, 8]);
    assert!(told.contains("[4, 8] in the file and [32]"), "{told}");
    let told = change(&|tensors| {
        tensors[norm].1 = Dtype::I32;
    });
    assert!(told.contains("I32, but must be F32, BF16 or F16"), "{told}");
    write(&path, &whole);

    let config = folder.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["vocab_size"] = json!(300);
    fs::write(&config, json.to_string()).unwrap();
    let error = imported(&place, &folder, "back").unwrap_err().to_string();
    assert!(error.contains("300") && error.contains("259"), "{error}");
    json["head_dim"] = json!(48);
    fs::write(&config, json.to_string()).unwrap();
    let error = import(&folder, &place.run("back"), &[]).unwrap_err();
    assert!(error.to_string().contains("model.head_dim = 48"), "{error}");
    assert!(!place.run("back").exists(), "nothing was written");
}
