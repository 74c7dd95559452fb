//! Streams epoch 0 of a cache on one thread, and tells speed and memory:
//! `cargo run --release -p datasets --example epoch -- CACHE [ROW_TOKENS]`

use std::path::Path;
use std::time::Instant;

use datasets::{Cache, Dataset, OpenOptions, Share};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let cache = arguments.next().ok_or("name a cache")?;
    let row_tokens = arguments.next().map_or(Ok(8192), |tokens| tokens.parse())?;
    let start = Instant::now();
    let cache = Cache::open(Path::new(&cache))?;
    let dataset = Dataset::of_cache(cache, OpenOptions::new(row_tokens))?;
    println!(
        "{}\nopened in {:.2} s",
        dataset.report(),
        start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    let rows = dataset.report().train.rows;
    let mut labels = 0;
    for (number, row) in dataset.epoch_rows(0, Share::default())?.enumerate() {
        labels += row?.label_count() as u64;
        let number = number as u64 + 1;
        if number.is_multiple_of(rows.div_ceil(10)) || number == rows {
            let speed = labels as f64 / start.elapsed().as_secs_f64() / 1e6;
            println!(
                "row {number}: {labels} labels, {speed:.1} M/s, {}",
                resident()
            );
        }
    }
    assert_eq!(labels, dataset.report().train.labels);
    Ok(())
}

/// Memory of this process, where the system tells.
fn resident() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let lines = status.lines().filter(|line| {
        ["VmHWM", "VmRSS", "RssAnon", "RssFile"]
            .iter()
            .any(|name| line.starts_with(name))
    });
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    words.collect::<Vec<_>>().join(", ")
}
