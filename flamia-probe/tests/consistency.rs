//! `probe consistency` and `probe capture` on a tiny model.
#![cfg(feature = "torch")]

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use flamia_kernels::Ablation;
use flamia_probe::torch::capture::Capture;
use flamia_probe::torch::consistency::{Consistency, Row};
use flamia_train::stop::Stop;
use flamia_train::trainer::Trainer;
use parquet::arrow::ArrowWriter;

/// A folder with sixty short documents.
struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let texts = (0..60).map(|i| "a row keeps its documents apart ".repeat(1 + i % 5));
        let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
        let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
        let file = File::create(folder.path().join("a.parquet")).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn train_flags(&self, more: &str) -> Vec<OsString> {
        let flags = "--device cpu --threads 1 --model-dim 32 --model-layers 2 --model-heads 2 \
            --model-kv-heads 1 --model-ffn-dim 64 --batch-row-tokens 128 --batch-rows 2 \
            --optim-warmup 2 --eval-rows 2 --eval-fraction 0.2 --data";
        let flags = flags.split_whitespace().map(OsString::from);
        let more = more.split_whitespace().map(OsString::from);
        flags
            .chain([self.path("a.parquet").into()])
            .chain(more)
            .collect()
    }

    fn consistency(&self, ablate: &[Ablation], more: &str) -> Consistency {
        Consistency {
            ablate: ablate.to_vec(),
            steps: 5,
            every: 2,
            seed: 1,
            svg: None,
            train: self.train_flags(more),
        }
    }
}

fn of<'a>(rows: &'a [Row], ablate: Option<&str>) -> Vec<&'a Row> {
    rows.iter()
        .filter(|row| row.ablate.as_deref() == ablate)
        .collect()
}

#[test]
fn every_run_has_its_rows_from_the_same_start() {
    let workplace = Workplace::new();
    let svg = workplace.path("loss.svg");
    let probe = Consistency {
        svg: Some(svg.clone()),
        ..workplace.consistency(
            &[Ablation::UnquantisedD, Ablation::P4Forward],
            "--attention mxfp8",
        )
    };
    let rows = probe.rows().unwrap();
    assert_eq!(rows.len(), 3 * 4);
    for ablate in [None, Some("unquantised-d"), Some("p4-forward")] {
        let rows = of(&rows, ablate);
        assert_eq!(
            rows.iter().map(|row| row.step).collect::<Vec<_>>(),
            [0, 2, 4, 5]
        );
        assert_eq!((rows[0].loss, rows[0].grad_norm), (None, None));
        for row in &rows {
            assert_eq!((&*row.path, row.diverged), ("mxfp8", false));
            assert!(row.val_loss.unwrap() > 0.0);
            for cosine in [row.o, row.dq, row.dk, row.dv] {
                assert!((0.5..=1.0 + 1e-9).contains(&cosine.unwrap()), "{row:?}");
            }
        }
        assert!(rows[3].loss.unwrap() < rows[1].loss.unwrap());
        assert!(rows[1..].iter().all(|row| row.grad_norm.unwrap() > 0.0));
    }
    // One model and one batch at the start: D differs in the backward pass alone, 4-bit P in the
    // forward pass too.
    let [matched, d, p4] = [None, Some("unquantised-d"), Some("p4-forward")].map(|a| of(&rows, a));
    assert_eq!((matched[0].val_loss, matched[0].o), (d[0].val_loss, d[0].o));
    assert_ne!(matched[0].dq, d[0].dq);
    assert!(p4[0].o < matched[0].o, "{p4:?}");
    assert!(
        matched[0].o.unwrap() > 0.99 && matched[0].dv.unwrap() > 0.99,
        "{matched:?}"
    );
    assert_ne!(matched[3].val_loss, d[3].val_loss);

    let drawn = fs::read_to_string(svg).unwrap();
    for name in ["matched", "unquantised-d", "p4-forward"] {
        for curve in ["training", "validation"] {
            assert!(
                drawn.contains(&format!("{name}, {curve}")),
                "{name}, {curve}"
            );
        }
    }
    assert_eq!(drawn.matches("<circle").count(), 12);
    // The same seed gives the same rows, and JSON that reads back.
    assert_eq!(rows, probe.rows().unwrap());
    let json = serde_json::to_value(&rows[0]).unwrap();
    assert_eq!(
        json.as_object().unwrap().keys().collect::<Vec<_>>(),
        [
            "path",
            "ablate",
            "step",
            "diverged",
            "loss",
            "val_loss",
            "grad_norm",
            "o",
            "dq",
            "dk",
            "dv"
        ]
    );
}

#[test]
fn a_run_that_diverges_ends_in_a_row_that_says_so() {
    let workplace = Workplace::new();
    let probe = workplace.consistency(&[Ablation::UnquantisedD], "--attention fp4 --optim-lr 1e30");
    let rows = probe.rows().unwrap();
    for ablate in [None, Some("unquantised-d")] {
        let last = *of(&rows, ablate).last().unwrap();
        assert!(last.diverged && last.step < 5, "{last:?}");
        assert_eq!((last.val_loss, last.o), (None, None));
    }
}

#[test]
fn what_cannot_be_at_odds_is_refused_before_anything_is_trained() {
    let workplace = Workplace::new();
    for (ablate, flags, told) in [
        (
            Ablation::Tiling,
            "--attention mxfp8",
            "ablate tiling does not go with path mxfp8",
        ),
        (
            Ablation::UnquantisedD,
            "--attention reference",
            "only low-bit paths",
        ),
        (
            Ablation::UnquantisedD,
            "--attention sdpa",
            "attention is sdpa",
        ),
        (
            Ablation::UnquantisedD,
            "--optim-lr fast",
            "optim.lr must be a finite number",
        ),
        (
            Ablation::UnquantisedD,
            "--steps 9",
            "cannot be used multiple times",
        ),
    ] {
        let error = workplace
            .consistency(&[ablate], flags)
            .rows()
            .unwrap_err()
            .to_string();
        assert!(error.contains(told), "{error}");
    }
    let never = Consistency {
        every: 0,
        ..workplace.consistency(&[], "")
    };
    assert!(never.rows().unwrap_err().to_string().contains("every is 0"));
}

#[test]
fn a_capture_is_an_input_of_the_other_probes() {
    let workplace = Workplace::new();
    let run = workplace.path("run");
    let mut flags = workplace.train_flags("--attention mxfp8 --steps 3 --out");
    flags.push(run.clone().into());
    Trainer::from_args(&flags, Stop::default())
        .unwrap()
        .run()
        .unwrap();
    let rows = Capture {
        run: run.clone(),
        out: None,
    }
    .rows()
    .unwrap();
    assert_eq!(rows.iter().map(|row| row.layer).collect::<Vec<_>>(), [0, 1]);
    let problems = flamia_probe::capture::read(&run.join("capture.safetensors")).unwrap();
    assert_eq!(problems.len(), 2);
    for (row, problem) in rows.iter().zip(&problems) {
        assert_eq!((row.step, &*row.attention, row.rows), (3, "mxfp8", 256));
        assert_eq!(row.documents, problem.documents.iter().count());
        assert_eq!(
            (problem.heads, problem.kv_heads, problem.head_dim),
            (2, 1, 64)
        );
        let largest = problem.q.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!((f64::from(largest) / row.q - 1.0).abs() < 0.004, "{row:?}");
        assert!(row.d_o > 0.0);
    }
    let nothing = Capture {
        run: Path::new("no/such/run").into(),
        out: None,
    };
    let error = nothing.rows().unwrap_err().to_string();
    assert!(error.contains("no/such/run holds no run"), "{error}");
}
