//! Text from a checkpoint is what the model says, whoever asks and however it is computed.
#![cfg(feature = "torch")]

mod common;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use common::run::{WORDS, Workplace, args, train, write_texts, write_word_tokenizer};
use flamia_sched::Documents;
use flamia_train::attention::Attention;
use flamia_train::commands::GenerateArgs;
use flamia_train::generate::{End, GenerateError, Sampling, Writer};
use flamia_train::saved::{Saved, SavedError};
use tch::{Device, Tensor, no_grad};

const GREEDY: Sampling = Sampling {
    temperature: 0.0,
    top_k: None,
    top_p: None,
    seed: 0,
};

fn trained(workplace: &Workplace, more: &str) -> PathBuf {
    let run = workplace.run("run");
    train(&args(&workplace.data, &run, more)).unwrap();
    run
}

fn open(path: &Path, more: &[&OsStr]) -> Result<Writer, GenerateError> {
    let line = [OsStr::new("generate"), path.as_os_str()]
        .into_iter()
        .chain(more.iter().copied());
    Writer::open(&GenerateArgs::parse_from(line))
}

fn text(writer: &Writer, prompt: &str, tokens: usize, sampling: &Sampling) -> (String, End) {
    let mut out = Vec::new();
    let written = writer.write(prompt, tokens, sampling, &mut out).unwrap();
    (String::from_utf8(out).unwrap(), written.end)
}

/// The likeliest next byte at every position of the document that begins with BOS, all read at once through
/// the attention that the run trains with.
fn likeliest(run: &Path, text: &str) -> Vec<i64> {
    let saved = Saved::open(run, &[]).unwrap();
    let model = saved.model(259, Device::Cpu).unwrap();
    let ids: Vec<i64> = [256]
        .into_iter()
        .chain(text.bytes().map(i64::from))
        .collect();
    let positions: Vec<i64> = (0..ids.len() as i64).collect();
    let logits = no_grad(|| {
        model
            .forward(
                &Tensor::from_slice(&ids),
                &Tensor::from_slice(&positions),
                &Documents::single(ids.len()).unwrap(),
                &Attention::new(&saved.settings),
            )
            .unwrap()
    });
    Vec::try_from(&logits.argmax(-1, false)).unwrap()
}

#[test]
fn greedy_text_is_the_argmax_of_teacher_forcing() {
    for more in ["", "--kernel-window 9", "--attention reference"] {
        let workplace = Workplace::new();
        let run = trained(&workplace, &format!("--steps 16 --optim-lr 1e-2 {more}"));
        let writer = open(&run, &[]).unwrap();
        for prompt in ["the row ke", ""] {
            let (text, end) = text(&writer, prompt, 40, &GREEDY);
            let forced = likeliest(&run, &format!("{prompt}{text}"));
            let written: Vec<i64> = text.bytes().map(i64::from).collect();
            let from = prompt.len();
            assert_eq!(
                forced[from..from + written.len()],
                written,
                "{more} {text:?}"
            );
            match end {
                End::Tokens => assert_eq!(written.len(), 40),
                End::Document => assert_eq!(forced[from + written.len()], 257),
            }
            assert!(!text.is_empty() || end == End::Document);
        }
    }
}

#[test]
fn one_seed_gives_one_text() {
    let workplace = Workplace::new();
    let run = trained(&workplace, "--steps 16 --optim-lr 1e-2");
    let (one, two) = (open(&run, &[]).unwrap(), open(&run, &[]).unwrap());
    let sampling = |seed| Sampling {
        temperature: 1.0,
        seed,
        ..GREEDY
    };
    let texts: Vec<_> = (0..4)
        .map(|seed| text(&one, "the ", 60, &sampling(seed)))
        .collect();
    for (seed, text_of_seed) in (0..).zip(&texts) {
        assert_eq!(*text_of_seed, text(&two, "the ", 60, &sampling(seed)));
    }
    assert!(texts.iter().any(|text| *text != texts[0]));
}

#[test]
fn a_model_that_knows_its_text_by_heart_goes_on_with_it_and_ends_it() {
    const VERSE: &str = "a tile of keys, a row of queries, número ";
    let workplace = Workplace::new();
    let verses: Vec<String> = (0..60).map(|i| format!("{VERSE}{}", i % 10)).collect();
    write_texts(&workplace.data, &verses);
    let run = trained(
        &workplace,
        "--steps 150 --optim-lr 1e-2 --optim-warmup 10 --eval-every 150 --eval-fraction 0.3",
    );
    let writer = open(&run, &[]).unwrap();
    for prompt in ["", "a tile of keys, a"] {
        let (text, end) = text(&writer, prompt, 100, &GREEDY);
        let whole = format!("{prompt}{text}");
        let (verse, digit) = whole.split_at(whole.len() - 1);
        assert_eq!(verse, VERSE);
        assert!(digit.parse::<u8>().is_ok(), "{whole}");
        assert_eq!(end, End::Document);
    }
    // Fewer tokens than the document has; the cut character is not half written.
    let cut = VERSE.find('ú').unwrap() + 1;
    let (text, end) = text(&writer, "", cut, &GREEDY);
    assert_eq!(text, "a tile of keys, a row of queries, n\u{FFFD}");
    assert_eq!(end, End::Tokens);
}

#[test]
fn the_program_streams_to_standard_output_and_notes_beside_it() {
    let workplace = Workplace::new();
    let run = trained(&workplace, "--steps 2");
    let program = |flags: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_flamia-generate"))
            .arg(&run)
            .args(flags)
            .output()
            .unwrap()
    };
    let flags = ["--prompt", "the", "--tokens", "70", "--temperature", "0"];
    let output = program(&flags);
    assert!(output.status.success());
    let (expected, _) = text(&open(&run, &[]).unwrap(), "the", 70, &GREEDY);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(notes.contains("after step 2"), "{notes}");

    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let output = program(&flags);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("has no checkpoint yet"), "{told}");
}

#[test]
fn a_run_with_a_tokenizer_of_its_own_writes_in_its_words() {
    let workplace = Workplace::new();
    let tokenizer = workplace.run("words.json");
    write_word_tokenizer(&tokenizer);
    let more = format!(
        "--steps 30 --optim-lr 1e-2 --tokenizer {}",
        tokenizer.display()
    );
    let run = trained(&workplace, &more);
    let writer = open(&run, &[]).unwrap();
    let (text, _) = text(&writer, "the row", 12, &GREEDY);
    assert!(!text.is_empty());
    assert!(
        text.split_whitespace().all(|word| WORDS.contains(&word)),
        "{text:?}"
    );
    assert!(
        text.starts_with(' '),
        "the prompt's last word has ended: {text:?}"
    );
}

#[test]
fn the_data_need_not_be_there_but_the_tokenizer_must_be_the_runs() {
    let workplace = Workplace::new();
    let run = trained(&workplace, "--steps 2");
    fs::remove_file(&workplace.data).unwrap();
    assert!(open(&run, &[]).is_ok());

    let other = workplace.run("tokenizer.json");
    write_word_tokenizer(&other);
    let error = open(&run, &["--tokenizer".as_ref(), other.as_os_str()]);
    assert!(matches!(
        error.err().unwrap(),
        GenerateError::Saved(SavedError::Tokenizer { .. })
    ));
}
