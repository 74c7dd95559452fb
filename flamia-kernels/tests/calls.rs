//! What a call accepts, and how it refuses the rest.

mod common;

use common::rng;
use flamia_kernels::{
    Ablation, AttentionError, DkRounding, DqAccumulator, DsExponent, Exponential, Hadamard, Mask,
    OperandScales, Options, Path, Polynomial, Profile, TensorView, ValueScales, cpu,
};
use flamia_sched::Documents;
use rand::RngExt;

fn random(len: usize) -> Vec<f32> {
    let mut rng = rng(len as u64);
    (0..len).map(|_| rng.random_range(-2.0..2.0)).collect()
}

/// `[batch, heads, length, head_dim]` storage, read as `[batch, length, heads, head_dim]`, with a
/// gap after every row.
fn strided(x: &[f32], [batch, length, heads, dim]: [usize; 4]) -> (Vec<f32>, [usize; 4]) {
    let row = dim + 5;
    let strides = [heads * length * row, row, length * row, 1];
    let mut out = vec![f32::NAN; batch * strides[0]];
    for (i, value) in x.iter().enumerate() {
        let (d, h) = (i % dim, i / dim % heads);
        let (l, b) = (i / dim / heads % length, i / dim / heads / length);
        out[b * strides[0] + l * strides[1] + h * strides[2] + d] = *value;
    }
    (out, strides)
}

#[test]
fn strides_and_batches_are_read_as_they_lie() {
    let (batch, length, heads, kv_heads, dim) = (2, 45, 4, 2, 64);
    let documents = Documents::from_lengths(&[20, 25, 45]).unwrap();
    let rows = batch * length;
    let (q, k) = (random(rows * heads * dim), random(rows * kv_heads * dim));
    let v: Vec<f32> = k.iter().rev().copied().collect();
    for path in [Path::Reference, Path::Mxfp8] {
        let options = Options::new(path, Mask::Causal);
        let packed = |x, heads| TensorView::packed("x", x, rows, heads, dim).unwrap();
        let expected = cpu::forward(
            &packed(&q, heads),
            &packed(&k, kv_heads),
            &packed(&v, kv_heads),
            &documents,
            &options,
            None,
        )
        .unwrap();

        let shape = |heads| [batch, length, heads, dim];
        let [q, k, v] = [(&q, heads), (&k, kv_heads), (&v, kv_heads)]
            .map(|(x, heads)| (strided(x, shape(heads)), shape(heads)));
        let [q, k, v] = [&q, &k, &v]
            .map(|((x, strides), shape)| TensorView::new("x", x, *shape, *strides).unwrap());
        let found = cpu::forward(&q, &k, &v, &documents, &options, None).unwrap();
        assert_eq!(found, expected);
        assert!(found.o.iter().all(|x| x.is_finite()));
    }
}

fn call(
    q: [usize; 3],
    k: [usize; 3],
    v: [usize; 3],
    documents: &Documents,
    options: &Options,
) -> Result<(), AttentionError> {
    let data = vec![0.0f32; 1 << 16];
    let [q, k, v] = [q, k, v].map(|[r, h, d]| TensorView::packed("x", &data, r, h, d).unwrap());
    let forward = cpu::forward(&q, &k, &v, documents, options, None)?;
    let [rows, heads, dim] = q.packed_shape();
    let o = TensorView::packed("o", &forward.o, rows, heads, dim)?;
    cpu::backward(&q, &k, &v, &o, &forward.lse, &o, documents, options, None)?;
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    let documents = Documents::single(8).unwrap();
    let kv = [8, 2, 64];
    assert_eq!(call([8, 4, 64], kv, kv, &documents, &options), Ok(()));

    let refused = |q, k, v| call(q, k, v, &documents, &options).unwrap_err().to_string();
    let message = refused([8, 3, 64], kv, kv);
    assert!(
        message.contains("3 query heads cannot share 2"),
        "{message}"
    );
    let message = refused([8, 4, 80], [8, 2, 80], [8, 2, 80]);
    assert!(
        message.contains("head dimension 80") && message.contains("[64, 96, 128, 256]"),
        "{message}"
    );
    let message = refused([8, 4, 64], [7, 2, 64], kv);
    assert!(
        message.starts_with("k has shape [7, 2, 64], expected [8, 2, 64]"),
        "{message}"
    );
    let message = refused([8, 4, 64], kv, [8, 4, 64]);
    assert!(message.starts_with("v has shape [8, 4, 64]"), "{message}");
    let message = refused([9, 4, 64], [9, 2, 64], [9, 2, 64]);
    assert!(
        message.contains("documents cover 8 rows, but the tensors have 9"),
        "{message}"
    );
    assert!(matches!(
        call([8, 4, 64], [8, 0, 64], [8, 0, 64], &documents, &options),
        Err(AttentionError::Heads {
            heads: 4,
            kv_heads: 0
        })
    ));
}

#[test]
fn a_document_in_two_sequences_is_refused() {
    let data = vec![0.0f32; 8 * 64];
    let view = TensorView::new("x", &data, [2, 4, 1, 64], [256, 64, 64, 1]).unwrap();
    let options = Options::new(Path::Reference, Mask::Full);
    let forward = |lengths: &[usize]| {
        let documents = Documents::from_lengths(lengths).unwrap();
        cpu::forward(&view, &view, &view, &documents, &options, None)
    };
    assert!(forward(&[4, 3, 1]).is_ok());
    assert_eq!(
        forward(&[3, 2, 3]).unwrap_err(),
        AttentionError::CrossesBatch {
            document: 1,
            start: 3,
            end: 5,
            length: 4
        }
    );
}

#[test]
fn a_view_past_its_buffer_is_refused() {
    let data = vec![0.0f32; 100];
    let shape = [1, 2, 1, 64];
    assert!(TensorView::new("q", &data, shape, [0, 36, 64, 1]).is_ok());
    let error = TensorView::new("q", &data, shape, [0, 37, 64, 1])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("needs 101 elements, but its buffer has 100"),
        "{error}"
    );
    assert!(TensorView::new("q", &data, shape, [0, usize::MAX, 64, 1]).is_err());
}

#[test]
fn options_that_would_corrupt_results_are_refused() {
    let defaults = Options::new(Path::Mxfp8, Mask::Causal);
    assert_eq!(defaults.validate(64), Ok(()));
    // Both ends of the bound: log2(448) = 8.807.
    assert_eq!(
        Options {
            c: 8,
            tau: 0.0,
            ..defaults
        }
        .validate(64),
        Ok(())
    );
    assert_eq!(
        Options {
            c: 4,
            tau: 4.8,
            ..defaults
        }
        .validate(64),
        Ok(())
    );
    let error = Options {
        c: 8,
        tau: 2.0,
        ..defaults
    }
    .validate(64)
    .unwrap_err();
    assert_eq!(error, AttentionError::Saturates { c: 8, tau: 2.0 });
    assert!(error.to_string().contains("log2(448) = 8.807"));
    assert!(
        Options {
            tau: f32::NAN,
            ..defaults
        }
        .validate(64)
        .is_err()
    );
    assert!(
        Options {
            scale: Some(f64::INFINITY),
            ..defaults
        }
        .validate(64)
        .is_err()
    );
    assert!(
        Options {
            hysteresis: 0,
            ..defaults
        }
        .validate(64)
        .is_err()
    );
}

fn parses_back<T: std::str::FromStr<Err = AttentionError> + ToString>(names: &[&str]) {
    for name in names {
        let Ok(value) = name.parse::<T>() else {
            panic!("{name} is not known")
        };
        assert_eq!(value.to_string(), *name);
    }
    assert!("fp8".parse::<T>().is_err());
}

#[test]
fn names_parse_back_and_strangers_are_refused() {
    parses_back::<Path>(&["reference", "mxfp8", "nvfp4", "fp4"]);
    parses_back::<Profile>(&["block-scaled", "hopper"]);
    parses_back::<Hadamard>(&["auto", "on", "off"]);
    parses_back::<DqAccumulator>(&["fp16", "fp16-causal", "fp32"]);
    parses_back::<OperandScales>(&["block", "token"]);
    parses_back::<DsExponent>(&["square", "row"]);
    parses_back::<Exponential>(&["exact", "polynomial", "mitchell-p", "schraudolph"]);
    parses_back::<ValueScales>(&["diagonal", "everywhere"]);
    parses_back::<DkRounding>(&["nearest", "stochastic"]);
    for ablation in Ablation::ALL {
        parses_back::<Ablation>(&[&ablation.to_string()]);
        assert!(
            ablation
                .warning()
                .contains(&format!("`ablate = {ablation}`"))
        );
    }
    let error = "fp8".parse::<Path>().unwrap_err().to_string();
    assert_eq!(
        error,
        r#"Path "fp8" is not known: use one of ["reference", "mxfp8", "nvfp4", "fp4"]"#
    );
}

/// What does not go together, with the words that say what to do.
#[test]
fn options_that_do_not_go_together_are_refused() {
    let new = |path| Options::new(path, Mask::Causal);
    let refused = |options: Options, head_dim: usize, words: &[&str]| {
        let message = options.validate(head_dim).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{message}");
        }
    };
    for path in Path::ALL {
        for head_dim in [64, 96, 128, 256] {
            assert_eq!(new(path).validate(head_dim), Ok(()));
            assert_eq!(new(path).exact().validate(head_dim), Ok(()));
        }
        refused(new(path), 80, &["80", "64, 96, 128, 256"]);
    }
    let hopper = Options {
        profile: Profile::Hopper,
        ..new(Path::Mxfp8)
    };
    refused(hopper, 96, &["[64, 128]"]);
    refused(hopper.exact(), 64, &["profile hopper", "block-scaled"]);
    for path in [Path::Nvfp4, Path::Fp4] {
        let options = Options {
            profile: Profile::Hopper,
            ..new(path)
        };
        refused(options, 64, &["Hopper has no 4-bit"]);
    }
    let rotated = Options {
        hadamard: Hadamard::On,
        ..new(Path::Nvfp4)
    };
    assert_eq!(rotated.validate(256), Ok(()));
    refused(rotated, 96, &["power of two"]);
    let options = Options {
        dk_rounding: DkRounding::Stochastic,
        ..new(Path::Mxfp8)
    };
    refused(options, 64, &["options of `fp4`"]);
    let exponentials = [
        Exponential::Polynomial,
        Exponential::MitchellP,
        Exponential::Schraudolph,
    ];
    for (exponential, paths) in exponentials.into_iter().zip([
        &[Path::Mxfp8, Path::Nvfp4, Path::Fp4][..],
        &[Path::Fp4],
        &[Path::Mxfp8, Path::Nvfp4],
    ]) {
        for path in Path::ALL {
            let options = Options {
                exponential,
                ..new(path)
            };
            assert_eq!(
                options.validate(64).is_ok(),
                paths.contains(&path),
                "{exponential} {path}"
            );
            let trains = exponential == Exponential::Polynomial && paths.contains(&path);
            assert_eq!(
                options.validate_training(64).is_ok(),
                trains,
                "{exponential} {path}"
            );
        }
    }
    let options = Options {
        exponential: Exponential::Schraudolph,
        ..new(Path::Mxfp8)
    };
    let message = options.validate_training(64).unwrap_err().to_string();
    assert!(
        message.contains("inference only") && message.contains("backward"),
        "{message}"
    );
    for ablation in Ablation::ALL {
        for path in Path::ALL {
            let options = Options {
                ablate: Some(ablation),
                ..new(path)
            };
            assert_eq!(options.validate(64).is_ok(), ablation.applies_to(path));
        }
    }
    for (degree, eighths) in [(1, 4), (6, 4), (3, 9)] {
        let options = Options {
            polynomial: Polynomial { degree, eighths },
            ..new(Path::Mxfp8)
        };
        refused(options, 64, &["polynomial"]);
    }
}
