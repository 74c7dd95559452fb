//! What packing makes of some shards:
//! `cargo run --release -p datasets --example rows -- ROW_TOKENS [tokenizer.json] [SHARD_OR_FOLDER]...`
//!
//! Without a shard, of the default corpus, which it builds in `target/corpus`. Without a
//! tokenizer, by bytes.

use std::path::{Path, PathBuf};
use std::time::Instant;

use datasets::{Dataset, OpenOptions, SpecialIds, Tokenizer, corpus};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let row_tokens = if arguments.is_empty() {
        512
    } else {
        arguments.remove(0).parse()?
    };
    let tokenizer = match arguments.first() {
        Some(first) if first.ends_with(".json") => {
            Tokenizer::from_file(Path::new(&arguments.remove(0)), SpecialIds::default())?
        }
        _ => Tokenizer::byte_level(),
    };
    let mut paths: Vec<PathBuf> = arguments.into_iter().map(PathBuf::from).collect();
    let start = Instant::now();
    if paths.is_empty() {
        let shard = corpus::build(Path::new("."), Path::new("target/corpus"))?;
        println!("{shard}\n{:.2} s", start.elapsed().as_secs_f64());
        paths.push(shard.path);
    }
    let start = Instant::now();
    let dataset = Dataset::open(&paths, tokenizer, OpenOptions::new(row_tokens))?;
    println!(
        "{}\nopened in {:.2} s",
        dataset.report(),
        start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    let rows = dataset.report().train.rows;
    let labels: usize = dataset
        .stream()
        .take(rows as usize)
        .map(|row| row.label_count())
        .sum();
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "epoch 0: {labels} labels in {seconds:.2} s, {:.1} M/s",
        labels as f64 / seconds / 1e6
    );
    Ok(())
}
