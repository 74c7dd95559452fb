//! A capture holds what attention saw and the gradients that came back.
#![cfg(feature = "torch")]

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use common::run::{Workplace, args, train};
use common::{CAUSAL_SDPA, attention, floats, model, tiny_shape};
use flamia_sched::Documents;
use flamia_train::attention::{Attend, Attention, AttentionFailure};
use flamia_train::batch::MicroBatch;
use flamia_train::capture::{Activations, CaptureError, capture};
use flamia_train::model::ModelShape;
use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};

/// Two rows of documents: 3 and 5 tokens, then 4 and 2 of padding.
fn batch() -> MicroBatch {
    let row = |tokens: &[i64], cu_seqlens: &[i64], padding: usize| {
        let starts = |t: usize| cu_seqlens.contains(&(t as i64));
        datasets::Row {
            tokens: tokens.to_vec(),
            labels: (0..tokens.len())
                .map(|t| match starts(t + 1) || t + padding >= tokens.len() {
                    true => -100,
                    false => tokens[t + 1],
                })
                .collect(),
            positions: (0..tokens.len() as i64)
                .map(|t| t - cu_seqlens.iter().filter(|&&s| s <= t).max().unwrap())
                .collect(),
            cu_seqlens: cu_seqlens.to_vec(),
            padding,
            bytes: 1,
        }
    };
    let rows = [
        row(&[1, 2, 3, 4, 5, 6, 7, 8], &[0, 3, 8], 0),
        row(&[9, 3, 1, 4, 0, 0], &[0, 4, 6], 2),
    ];
    MicroBatch::new(&rows, Device::Cpu).unwrap()
}

/// Attention that adds a leaf to its output, whose gradient is then the output's, and keeps copies.
struct Leaves {
    inner: Attention,
    calls: Mutex<Vec<[Tensor; 4]>>,
}

impl Attend for Leaves {
    fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
    ) -> Result<Tensor, AttentionFailure> {
        let o = self.inner.attend(layer, q, k, v, documents)?;
        let leaf = o.zeros_like().set_requires_grad(true);
        let kept = [q, k, v].map(|x| x.detach().copy());
        let [q, k, v] = kept;
        let shifted = o + &leaf;
        self.calls.lock().unwrap().push([q, k, v, leaf]);
        Ok(shifted)
    }
}

#[test]
fn activations_are_what_attention_saw_and_the_gradient_of_its_output() {
    for (inner, head_dim) in [(CAUSAL_SDPA, 6), (attention("fp4"), 64)] {
        let shape = ModelShape {
            head_dim,
            ..tiny_shape()
        };
        let model = model(shape, 3);
        let batch = batch();
        let found = Activations::of(&model, &batch, &inner).unwrap();
        assert_eq!(found.documents.cu_seqlens(), [0, 3, 8, 12, 14]);
        assert_eq!(found.layers.len(), 2);
        // Capturing trains nothing.
        assert!(
            model
                .params
                .iter()
                .all(|(_, param)| !param.grad().defined())
        );

        let leaves = Leaves {
            inner,
            calls: Mutex::default(),
        };
        let loss = batch.summed_loss(&model, &leaves).unwrap() / batch.label_tokens as f64;
        loss.backward();
        for (layer, [q, k, v, leaf]) in found.layers.iter().zip(leaves.calls.lock().unwrap().iter())
        {
            assert!(layer.q.equal(q) && layer.k.equal(k) && layer.v.equal(v));
            let expected = leaf.grad();
            assert!(expected.abs().max().double_value(&[]) > 0.0);
            assert!(layer.d_o.allclose(&expected, 1e-6, 1e-9, false));
            assert!(!layer.q.requires_grad());
        }
    }
}

#[test]
fn rotary_positions_are_in_the_captured_queries() {
    let model = model(tiny_shape(), 4);
    let layer = &Activations::of(&model, &batch(), &CAUSAL_SDPA)
        .unwrap()
        .layers[0];
    // Token 1 stands first in its row (position 0) and third in another document (position 2), token
    // 3 at positions 2 and 1: V is the same, Q is turned.
    for (a, b) in [(0, 10), (2, 9)] {
        assert!(layer.v.get(a).allclose(&layer.v.get(b), 1e-6, 1e-6, false));
        assert!(!layer.q.get(a).allclose(&layer.q.get(b), 1e-2, 1e-2, false));
    }
}

/// A tensor of a file: type, shape, elements widened.
type Stored = (Dtype, Vec<usize>, Vec<f64>);

/// A file's tensors by name, and its metadata.
fn read(path: &Path) -> (HashMap<String, Stored>, HashMap<String, String>) {
    let bytes = fs::read(path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let values = match view.dtype() {
            Dtype::BF16 => view
                .data()
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]])).into())
                .collect(),
            Dtype::I64 => view
                .data()
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64)
                .collect(),
            other => panic!("{name}: {other:?}"),
        };
        (name, (view.dtype(), view.shape().to_vec(), values))
    });
    (
        tensors.collect(),
        header.metadata().clone().unwrap_or_default(),
    )
}

#[test]
fn a_file_reads_back_to_the_bf16_values_of_what_was_captured() {
    let model = model(tiny_shape(), 5);
    let captured = Activations::of(&model, &batch(), &CAUSAL_SDPA).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    captured.write(&path, HashMap::new()).unwrap();
    let (tensors, _) = read(&path);
    assert_eq!(tensors.len(), 2 * 4 + 1);
    let (_, shape, boundaries) = &tensors["cu_seqlens"];
    assert_eq!(
        (&shape[..], &boundaries[..]),
        (&[5][..], &[0.0, 3.0, 8.0, 12.0, 14.0][..])
    );
    for (i, layer) in captured.layers.iter().enumerate() {
        for (name, tensor, heads) in [
            ("q", &layer.q, 4),
            ("k", &layer.k, 2),
            ("v", &layer.v, 2),
            ("d_o", &layer.d_o, 4),
        ] {
            let (dtype, shape, values) = &tensors[&format!("layer{i}.{name}")];
            assert_eq!((*dtype, &shape[..]), (Dtype::BF16, &[14, heads, 6][..]));
            let rounded = floats(&tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float));
            let rounded: Vec<f64> = rounded.into_iter().map(f64::from).collect();
            assert_eq!(*values, rounded, "layer{i}.{name}");
        }
    }
}

#[test]
fn a_run_can_be_captured_and_says_where_it_stood() {
    let workplace = Workplace::new();
    let run = workplace.run("run");
    train(&args(&workplace.data, &run, "--attention fp4 --steps 3")).unwrap();
    let out = run.join("capture.safetensors");
    let captured = capture(&run, &out).unwrap();
    assert_eq!((captured.step, &*captured.attention), (3, "fp4"));
    let (tensors, metadata) = read(&out);
    // Two rows of 64 tokens, two heads that share one, two layers.
    for (name, shape) in [
        ("layer0.q", [128, 2, 64]),
        ("layer1.d_o", [128, 2, 64]),
        ("layer1.k", [128, 1, 64]),
        ("layer0.v", [128, 1, 64]),
    ] {
        assert_eq!(tensors[name].1, shape, "{name}");
    }
    assert_eq!(tensors["cu_seqlens"].2.last(), Some(&128.0));
    assert_eq!(metadata["step"], "3");
    assert_eq!(metadata["attention"], "fp4");
    assert_eq!(metadata["run"], run.display().to_string());
    let state = fs::read(run.join("checkpoints/step-000003/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    assert_eq!(state["settings_sha256"], *metadata["settings_sha256"]);
    // The same checkpoint gives the same values again, and the run can still go on.
    let again = run.join("again.safetensors");
    capture(&run, &again).unwrap();
    assert_eq!(read(&again).0, tensors);
    train(&args(
        &workplace.data,
        &run,
        "--attention fp4 --steps 4 --resume",
    ))
    .unwrap();
}

#[test]
fn what_is_no_run_is_refused_by_name() {
    let workplace = Workplace::new();
    let run = workplace.run("nothing");
    let error = capture(&run, &run.join("x")).unwrap_err().to_string();
    assert!(error.contains("nothing holds no run"), "{error}");

    fs::create_dir(&run).unwrap();
    let mut settings = flamia_train::settings::Settings {
        data: Some(workplace.data.clone()),
        threads: 1,
        ..Default::default()
    };
    settings.batch.row_tokens = 64;
    settings.eval.fraction = 0.2;
    fs::write(run.join("settings.toml"), settings.to_toml().unwrap()).unwrap();
    let error = capture(&run, &run.join("x")).unwrap_err();
    assert!(
        matches!(error, CaptureError::NoCheckpoint { .. }),
        "{error}"
    );
    assert!(!run.join("x").exists());
}
