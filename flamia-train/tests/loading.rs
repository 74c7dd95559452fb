//! TRN-05: weights that do not fit are refused, with names, and nothing is half loaded.
#![cfg(feature = "torch")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{floats, model, tiny_shape};
use flamia_train::checkpoint::{CheckpointError, TensorProblem, load_tensors, write_tensors};
use flamia_train::model::{Model, ModelShape, Params};
use safetensors::tensor::{Dtype, TensorView, serialize};
use tch::{Device, Tensor};

fn named(params: &Params) -> Vec<(String, &Tensor)> {
    params
        .iter()
        .map(|(name, tensor)| (name.to_string(), tensor))
        .collect()
}

/// A folder with the weights of `model` in it.
fn saved(model: &Model) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, write_tensors(named(&model.params), &path).unwrap()).unwrap();
    (folder, path)
}

/// The problems that loading `path` into a fresh model of `shape` meets; it must stay as it was.
fn problems(path: &std::path::Path, shape: ModelShape) -> Vec<TensorProblem> {
    let target = model(shape, 99);
    let before: Vec<_> = target
        .params
        .iter()
        .map(|(_, tensor)| floats(tensor))
        .collect();
    let error = load_tensors(named(&target.params), path).unwrap_err();
    let after: Vec<_> = target
        .params
        .iter()
        .map(|(_, tensor)| floats(tensor))
        .collect();
    assert_eq!(before, after, "a refused file changed the model");
    match error {
        CheckpointError::Mismatch { problems, .. } => problems,
        other => panic!("unexpected error {other}"),
    }
}

#[test]
fn what_was_saved_is_loaded_bit_for_bit() {
    let source = model(tiny_shape(), 1);
    let (_folder, path) = saved(&source);
    let target = model(tiny_shape(), 2);
    load_tensors(named(&target.params), &path).unwrap();
    for (name, tensor) in target.params.iter() {
        assert_eq!(floats(tensor), floats(source.params.get(name)), "{name}");
        assert!(tensor.requires_grad(), "{name} still learns");
    }
}

#[test]
fn a_model_that_is_not_built_yet_takes_nothing() {
    let source = model(tiny_shape(), 1);
    let (_folder, path) = saved(&source);
    let empty = Params::init(&[], 0, Device::Cpu).unwrap();
    let error = load_tensors(named(&empty), &path).unwrap_err();
    let CheckpointError::Mismatch { problems, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(problems.len(), source.params.iter().count());
    assert!(
        error.to_string().contains("is not part of the model"),
        "{error}"
    );
}

#[test]
fn missing_and_extra_tensors_are_named() {
    // The untied model has a head of its own, the tied one has none.
    let untied = ModelShape {
        tied: false,
        ..tiny_shape()
    };
    let tied = ModelShape {
        tied: true,
        ..tiny_shape()
    };
    let name = "lm_head.weight".to_string();

    let (_folder, path) = saved(&model(untied.clone(), 1));
    let extra = problems(&path, tied.clone());
    assert_eq!(extra, [TensorProblem::Unexpected { name: name.clone() }]);

    let (_folder, path) = saved(&model(tied, 1));
    let missing = problems(&path, untied);
    assert_eq!(missing, [TensorProblem::Missing { name }]);
}

/// A file that holds `tensors` as type `dtype`, all zero.
fn zeros(tensors: &[(String, Vec<usize>)], dtype: Dtype) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let data = vec![0u8; 1 << 16];
    let views = tensors.iter().map(|(name, shape)| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (
            name.as_str(),
            TensorView::new(dtype, shape.clone(), &data[..bytes]).unwrap(),
        )
    });
    fs::write(&path, serialize(views, None).unwrap()).unwrap();
    (folder, path)
}

fn names_and_shapes(shape: &ModelShape) -> Vec<(String, Vec<usize>)> {
    let sizes = |shape: &[i64]| shape.iter().map(|&n| n as usize).collect();
    let specs = shape.parameters(0.02);
    specs
        .into_iter()
        .map(|spec| (spec.name, sizes(&spec.shape)))
        .collect()
}

#[test]
fn another_type_is_refused_rather_than_converted() {
    let tensors = names_and_shapes(&tiny_shape());
    let (_folder, path) = zeros(&tensors, Dtype::BF16);
    let found = problems(&path, tiny_shape());
    assert_eq!(found.len(), tensors.len());
    let first = TensorProblem::Dtype {
        name: "lm_head.weight".into(),
        expected: "F32",
        found: "BF16".into(),
    };
    assert_eq!(found[0], first);
}

#[test]
fn a_row_is_not_broadcast_over_a_matrix() {
    let mut tensors = names_and_shapes(&tiny_shape());
    let embedding = tensors
        .iter_mut()
        .find(|(name, _)| name == "model.embed_tokens.weight");
    embedding.unwrap().1 = vec![1, 8];
    let (_folder, path) = zeros(&tensors, Dtype::F32);
    let expected = TensorProblem::Shape {
        name: "model.embed_tokens.weight".into(),
        expected: vec![11, 8],
        found: vec![1, 8],
    };
    assert_eq!(problems(&path, tiny_shape()), [expected]);
}

#[test]
fn another_config_is_refused_with_the_shapes() {
    let (_folder, path) = saved(&model(
        ModelShape {
            ffn_dim: 16,
            ..tiny_shape()
        },
        1,
    ));
    let found = problems(&path, tiny_shape());
    assert_eq!(
        found.len(),
        2 * 3,
        "three feed-forward matrices in each of two layers"
    );
    let shown = found[0].to_string();
    assert!(shown.contains("mlp.down_proj.weight is [8, 16]"), "{shown}");
    assert!(shown.contains("[8, 12] in the model"), "{shown}");
}

#[test]
fn a_file_that_is_no_safetensors_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, b"not tensors").unwrap();
    let error = load_tensors(std::iter::empty(), &path).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NotSafetensors { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}

#[test]
fn a_tensor_that_is_not_f32_makes_no_file() {
    let (sound, other) = (Tensor::from_slice(&[1f32]), Tensor::from_slice(&[1f64]));
    let tensors = [("a".into(), &sound), ("b".into(), &other)];
    let error = write_tensors(tensors, Path::new("x.safetensors")).unwrap_err();
    assert!(matches!(error, CheckpointError::Torch { .. }), "{error}");
    assert!(error.to_string().contains("x.safetensors"), "{error}");
}
